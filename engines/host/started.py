"""What a role's service is given once the engine can serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from engines.base import Engine, EngineInfo, Handle

__all__ = ["StartedEngine"]


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that can serve, and who it is to other workers."""

    engine: Engine
    info: EngineInfo
    instance_id: str
    epoch: int
    address: str
    """host:port of this worker's gRPC server, as others reach it."""
    registry: CollectorRegistry
    release: Callable[[Handle], None]
    """Frees a handle on the prefill worker that made it, in the background."""
