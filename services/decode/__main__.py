"""`tokenmill decode`: a worker that generates, from KV that a prefill worker computed or by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.host import run
from controlplane.program import run_program
from controlplane.settings import CommonSettings, load
from engines.base import Role
from engines.host.decode_service import DecodeService
from engines.host.worker import Worker
from engines.settings import EngineSettings
from services.decode.settings import DecodeSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop. Raises `SettingsError`."""
    loaded = load(
        {"common": CommonSettings, "engine": EngineSettings, "decode": DecodeSettings},
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog="tokenmill decode",
        description="A worker that generates.",
    )
    settings = loaded.get(DecodeSettings)
    service = DecodeService(settings.limits())
    worker = Worker(
        Role.DECODE,
        loaded.get(EngineSettings),
        service,
        stall_timeout_s=settings.stall_timeout_s,
        canary_idle_s=settings.canary_idle_s,
    )
    return run(worker, loaded.get(CommonSettings))


if __name__ == "__main__":
    sys.exit(run_program("tokenmill decode", main))
