"""The [router] section of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting
from services.router.policies import POLICIES, Parameters

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
    queue_max_wait_s: float = setting(
        5.0,
        "longest time until a worker begins a request, at the router and in the worker's backlog together; one "
        "expected to wait longer is refused at once, seconds",
        minimum=0.001,
    )
    worker_backlog: float = setting(
        1.0,
        "requests a worker is given beyond those it runs at a time, as a part of these, before any wait at the router",
        minimum=0,
        maximum=100,
    )
    overlap_weight: float = setting(
        1.0, "policy linear: what a prompt block to compute counts against a block in memory", minimum=0
    )
    temperature: float = setting(
        0.0, "policy linear: 0 takes the best, more draws among the better ones", minimum=0, maximum=100
    )
    kv_headroom: float = setting(
        0.05, "policy ttft: part of a worker's KV blocks to leave free while another worker can", minimum=0, maximum=1
    )
    max_itl_ms: float = setting(
        0.0, "policy ttft: predicted inter-token time a worker is not brought over while another can; 0: any", minimum=0
    )
    session_ttl_s: float = setting(
        600.0, "a session that asks for nothing for so long has no worker of its own any more, seconds", minimum=0
    )
    explain_ring: int = setting(
        1000, "latest decisions that `tokenmill router explain` can tell of", minimum=1, maximum=1_000_000
    )
    decisions_log: str = setting("", "file that every decision goes to, as a line of JSON", metavar="FILE")

    @property
    def parameters(self) -> Parameters:
        """What a user may tune of a policy."""
        return Parameters(
            overlap_weight=self.overlap_weight,
            temperature=self.temperature,
            kv_headroom=self.kv_headroom,
            max_itl_s=self.max_itl_ms / 1000,
        )
