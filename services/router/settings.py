"""The [router] section of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting
from services.router.policies import POLICIES

__all__ = ["RouterSettings"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How requests are placed."""

    policy: str = setting("lmetric", "how a worker is chosen", choices=tuple(POLICIES))
    remote_prefill_min_tokens: int = setting(
        0, "prompts with more uncached tokens than this are prefilled by a prefill worker; 0: all prompts", minimum=0
    )
    index_max_blocks: int = setting(
        10_000_000,
        "KV blocks of all workers to know of, at about 100 bytes each; past it those matched longest ago are forgotten",
        minimum=1,
    )
    approximate_ttl_s: float = setting(
        300.0,
        "a worker without KV events is believed to have cached what was placed on it for so long, seconds",
        minimum=1,
    )
    placement_ttl_s: float = setting(
        120.0, "a placement of which no report comes is forgotten after this long, seconds", minimum=1
    )
    queue_max_requests: int = setting(
        1024,
        "requests of one model that may wait at the router while every worker is full; 0: none, workers queue them",
        minimum=0,
        maximum=1_000_000,
    )
    queue_max_tokens: int = setting(
        4_000_000, "uncached prompt tokens of the requests of one model that may wait at the router", minimum=1
    )
    worker_backlog: float = setting(
        0.25,
        "requests a worker is given beyond those it runs at a time, as a part of these, before any wait at the router",
        minimum=0,
        maximum=100,
    )
