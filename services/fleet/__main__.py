"""`tokenmill fleet`: many light workers in one process, to load routers, etcd and NATS."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.errors import SettingsError
from controlplane.host import run
from controlplane.program import run_program
from controlplane.settings import CommonSettings, load
from engines.settings import EngineSettings
from services.fleet.fleet import Fleet
from services.fleet.settings import FleetSettings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop. Raises `SettingsError`."""
    loaded = load(
        {"common": CommonSettings, "engine": EngineSettings, "fleet": FleetSettings},
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog="tokenmill fleet",
        description="Many light decode workers on simulated engines, in one process.",
    )
    common, engine = loaded.get(CommonSettings), loaded.get(EngineSettings)
    if engine.engine != "sim" or engine.sim_kv_bytes_per_block != 0:
        raise SettingsError(
            "a fleet's workers are simulated and move no KV: give --engine sim --sim-kv-bytes-per-block 0",
            param="engine.engine",
        )
    return run(Fleet(loaded.get(FleetSettings), engine), common)


if __name__ == "__main__":
    sys.exit(run_program("tokenmill fleet", main))
