"""`tokenmill frontend`: starts the frontend service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane import host
from controlplane.errors import SettingsError
from controlplane.settings import CommonSettings, load
from services.frontend.service import FrontendService
from services.frontend.settings import FrontendSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until it is told to stop; returns the exit code."""
    sections = {"common": CommonSettings, "frontend": FrontendSettings}
    arguments = sys.argv[1:] if argv is None else argv
    try:
        loaded = load(sections, arguments, os.environ, prog="tokenmill frontend")
    except SettingsError as error:
        print(f"tokenmill frontend: {error.message}", file=sys.stderr)
        return 2
    return host.run(FrontendService(loaded.get(FrontendSettings)), loaded.get(CommonSettings))


if __name__ == "__main__":
    sys.exit(main())
