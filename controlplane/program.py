"""How our programs end on an error of ours: one line on stderr, and an exit code that says whose fault it was."""

from __future__ import annotations

import sys
from collections.abc import Callable

from controlplane.errors import SettingsError, TokenmillError

__all__ = ["run_program"]


def run_program(name: str, main: Callable[[], int]) -> int:
    """What `main` returns; 1 where it failed, 2 where the settings are wrong, 130 where it was interrupted."""
    try:
        return main()
    except TokenmillError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130
