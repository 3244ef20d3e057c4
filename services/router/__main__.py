"""`tokenmill router`: decides which worker serves a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.host import run
from controlplane.listeners import MAX_CALLS
from controlplane.program import run_program
from controlplane.settings import CommonSettings, load
from services.router.service import RouterService
from services.router.settings import RouterSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop. Raises `SettingsError`."""
    loaded = load(
        {"common": CommonSettings, "router": RouterSettings},
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog="tokenmill router",
        description="Decides which worker serves a request.",
    )
    settings = loaded.get(RouterSettings)
    # Whoever waits keeps its call open.
    return run(RouterService(settings), loaded.get(CommonSettings), max_calls=settings.queue_max_requests + MAX_CALLS)


if __name__ == "__main__":
    sys.exit(run_program("tokenmill router", main))
