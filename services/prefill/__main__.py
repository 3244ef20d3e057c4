"""`tokenmill prefill`: a worker that computes prompts and holds their KV until a decode worker has read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.host import run
from controlplane.program import run_program
from controlplane.settings import CommonSettings, load
from engines.base import Role
from engines.host.prefill_service import PrefillService
from engines.host.worker import Worker
from engines.settings import EngineSettings
from services.prefill.settings import PrefillSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop. Raises `SettingsError`."""
    loaded = load(
        {"common": CommonSettings, "engine": EngineSettings, "prefill": PrefillSettings},
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog="tokenmill prefill",
        description="A worker that computes prompts.",
    )
    settings = loaded.get(PrefillSettings)
    service = PrefillService(settings.limits())
    worker = Worker(
        Role.PREFILL,
        loaded.get(EngineSettings),
        service,
        stall_timeout_s=settings.stall_timeout_s,
        canary_idle_s=settings.canary_idle_s,
    )
    return run(worker, loaded.get(CommonSettings))


if __name__ == "__main__":
    sys.exit(run_program("tokenmill prefill", main))
