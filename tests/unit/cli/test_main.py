import subprocess
import sys

import pytest

from cli.main import main


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    for command in ("up", "down", "status", "chat", "models", "config", "frontend", "router", "prefill", "decode"):
        assert f"\n  {command} " in listed


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert "'status'" in capsys.readouterr().err


def test_an_error_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--deployment", "surely-not-there"]) == 1
    assert capsys.readouterr().err == "tokenmill down: deployment 'surely-not-there' does not run on this machine\n"


def test_wrong_settings_have_an_exit_code_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--decode", "0"]) == 2
    assert "up.decode" in capsys.readouterr().err


def test_up_refuses_tls_instead_of_waiting_for_an_answer_in_clear_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--engine", "sim", "--tls-cert", "tls.crt", "--tls-key", "tls.key"]) == 2
    assert "tls_cert is for a frontend by itself" in capsys.readouterr().err


def test_the_router_command_imports_no_engine() -> None:
    program = (
        "import sys, cli.main, contextlib\nwith contextlib.suppress(SystemExit): cli.main.main(['router', '--help'])\n"
    )
    program += "assert 'services.router.__main__' in sys.modules\n"
    program += "print([name for name in sys.modules if name.split('.')[0] in ('engines', 'vllm', 'torch', 'nixl')])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"
