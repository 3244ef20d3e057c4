"""The [fleet] section."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting

__all__ = ["FleetSettings"]


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """What each process of a fleet is made of."""

    workers: int = setting(100, "light decode workers in a process", minimum=1, flag="--workers-per-process")
    prompts_per_s: float = setting(
        0.0, "prompts that each worker makes up for itself, so that its KV events flow", minimum=0
    )
