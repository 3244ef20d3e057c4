"""`tokenmill config`: what every program of a deployment would run with, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cli.sections import ALL_SECTIONS
from cli.tables import print_table
from controlplane.errors import SettingsError
from controlplane.settings import load

__all__ = ["main"]

_PROG = "tokenmill config show"
_DESCRIPTION = """\
Prints every setting, its value and where it came from: defaults < --config FILE < environment < flags.
Secrets are masked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    command, *flags = sys.argv[2:] if argv is None else argv or [""]
    if command not in ("show", "-h", "--help"):
        raise SettingsError(f"unknown subcommand {command!r}; the only one is: {_PROG}")
    loaded = load(
        ALL_SECTIONS, flags if command == "show" else ["--help"], os.environ, prog=_PROG, description=_DESCRIPTION
    )
    print_table(["setting", "value", "from"], [[one.key, one.value, one.source] for one in loaded.shown])
    return 0
