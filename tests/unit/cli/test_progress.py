import io

from rich.console import Console

from cli.up.progress import Progress


def _lines(file: io.StringIO) -> list[str]:
    return file.getvalue().splitlines()


def test_without_a_terminal_each_change_is_a_line() -> None:
    file = io.StringIO()
    with Progress(["decode"], Console(file=file)) as progress:
        progress.update("decode", "loading [weights]")
        progress.update("decode", "loading [weights]")
        progress.ready("decode")
        progress.ready("decode")
        progress.update("decode", "was killed by SIGKILL; restarting in 0.5 s")
        progress.ready("decode")
    assert _lines(file) == [
        "decode: loading [weights]",
        "decode: ready",
        "decode: was killed by SIGKILL; restarting in 0.5 s",
        "decode: ready",
    ]


def test_in_a_terminal_a_table_shows_everybody_and_stays() -> None:
    file = io.StringIO()
    with Progress(["router", "decode"], Console(file=file, force_terminal=True, width=80)) as progress:
        progress.ready("router")
        progress.update("decode", "loading [weights]")
    shown = file.getvalue()
    assert "loading [weights]" in shown
    assert "router" in shown


def test_after_the_table_changes_are_lines() -> None:
    file = io.StringIO()
    with Progress(["decode"], Console(file=file, force_terminal=True, width=80)) as progress:
        progress.ready("decode")
    before = len(file.getvalue())
    progress.update("decode", "was killed by SIGKILL; restarting in 0.5 s")
    assert file.getvalue()[before:] == "decode: was killed by SIGKILL; restarting in 0.5 s\n"
