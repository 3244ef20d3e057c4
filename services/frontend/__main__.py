"""`tokenmill frontend`: the front door, OpenAI HTTP and gRPC."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.host import run
from controlplane.program import run_program
from controlplane.settings import CommonSettings, load
from controlplane.tls import ServerTls
from services.frontend.service import FrontendService
from services.frontend.settings import FrontendSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop. Raises `SettingsError`."""
    loaded = load(
        {"common": CommonSettings, "frontend": FrontendSettings},
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog="tokenmill frontend",
        description="OpenAI HTTP and gRPC in, tokens out.",
    )
    settings = loaded.get(FrontendSettings)
    tls = ServerTls.load("frontend", settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return run(FrontendService(settings), loaded.get(CommonSettings), tls, max_calls=settings.max_connections)


if __name__ == "__main__":
    sys.exit(run_program("tokenmill frontend", main))
