from __future__ import annotations

import subprocess
import sys

import pytest

from controlplane.errors import SettingsError, TokenmillError, Unavailable
from controlplane.program import run_program


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError("port: 70000 is too much"), 2), (Unavailable("no etcd"), 1)]
)
def test_an_error_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: TokenmillError, code: int
) -> None:
    def main() -> int:
        raise error

    assert run_program("tokenmill x", main) == code
    assert capsys.readouterr().err == f"tokenmill x: {error.message}\n"


def test_a_service_started_as_a_module_says_what_is_wrong_with_its_settings_and_no_more() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.router", "--policy", "darts"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tokenmill router: ")
    assert "darts" in line
