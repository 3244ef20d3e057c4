"""`tokenmill models`: make the demonstration model, list what is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from controlplane.errors import TokenmillError
from engines import demo_model
from engines.models import DEMO, local_models

__all__ = ["main", "progress_bar"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the process's exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "list":
        return _list()
    return _fetch(arguments.to)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenmill models", description="Models on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="make a model directory that needs no model hub")
    fetch.add_argument("name", choices=[DEMO], help=f"{DEMO}: {demo_model.NAME}, 540 MB")
    fetch.add_argument("--to", type=Path, metavar="DIR", help=f"default: {demo_model.default_path()}")
    commands.add_parser("list", help="the models that were fetched")
    return parser


def _fetch(dest: Path | None) -> int:
    try:
        with progress_bar(demo_model.NAME) as show:
            path = demo_model.fetch(dest, show)
    except TokenmillError as error:
        print(f"tokenmill models: {error.message}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _list() -> int:
    for model in local_models():
        print(f"{model.name}\t{model.size_bytes / 1e6:.0f} MB\t{model.path}")
    return 0


@contextmanager
def progress_bar(name: str) -> Iterator[demo_model.OnProgress]:
    """A bar on standard error while `name` is made; one line a step where that is no terminal."""
    console = Console(stderr=True)
    last = ""

    def show_line(text: str, done: float) -> None:
        nonlocal last
        if text != last:
            console.print(f"{name}: {text}", highlight=False)
            last = text

    if not console.is_terminal:
        yield show_line
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda text, done: bar.update(task, description=f"{name}: {text}", completed=done)
