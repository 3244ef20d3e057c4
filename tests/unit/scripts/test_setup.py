from __future__ import annotations

import platform
import sys

import pytest

from scripts import setup


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying after NewConnectionError('...: Name or service not known')", "no way to the package index"),
        ("SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("PermissionError: [Errno 13] Permission denied: 'x'", "remove .venv"),
    ],
)
def test_a_failure_that_is_known_names_its_fix(output: str, fix: str) -> None:
    assert fix in setup.explain(output)


def test_a_failure_shows_what_the_command_said_last_and_not_its_warnings() -> None:
    told = setup.explain("WARNING: old\nERROR: broken\nWARNING: noise\n")
    assert "ERROR: broken" in told
    assert "noise" not in told


def test_this_machine_has_a_wheel_or_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert setup.no_vllm_wheel() == ""
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "glibc" in setup.no_vllm_wheel()
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    assert "PYTHON=" in setup.no_vllm_wheel()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in setup.no_vllm_wheel()
