"""What must be back to nothing when nothing runs, and what must not have grown. Pure: metrics in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Baseline", "held", "most", "outgrown"]

Metrics = Mapping[str, float]
Baseline = Mapping[str, float]

_NOTHING = {
    "tokenmill_kv_leases": "KV handles held",
    "tokenmill_kv_leased_blocks": "KV blocks held for readers",
    "tokenmill_kv_used_blocks": "KV blocks in use",
    "tokenmill_running_requests": "requests in the engine",
    "tokenmill_waiting_requests": "requests waiting in the engine",
    "tokenmill_queued_prefill_tokens": "prompt tokens not computed",
    "tokenmill_running_answers": "answers in the making",
    "tokenmill_router_placements": "placements in flight",
}
_BOUNDED = {
    "process_open_fds": ("file descriptors", 1.0, 48.0),
    "tokenmill_asyncio_tasks": ("asyncio tasks", 1.0, 48.0),
    "process_resident_memory_bytes": ("bytes of memory", 1.4, 96e6),
}
"""Metric -> its name for people, and how far it may grow: so many times, and so much more. What a connection or a
warm cache takes is no leak; what each request leaves behind is far over it within a minute."""


def held(metrics: Metrics) -> list[str]:
    """What an idle process still holds."""
    return [f"{metrics[name]:g} {text}" for name, text in _NOTHING.items() if metrics.get(name)]


def most(several: Iterable[Metrics]) -> Baseline:
    """The highest of each bounded metric among processes of one role."""
    metrics = list(several)
    return {name: max(one[name] for one in metrics) for name in _BOUNDED if all(name in one for one in metrics)}


def outgrown(baseline: Baseline, metrics: Metrics) -> list[str]:
    """What has grown past its bound since the baseline was taken."""
    return [
        f"{metrics[name]:g} {text}, {before:g} at the beginning"
        for name, before in baseline.items()
        for text, times, more in (_BOUNDED[name],)
        if metrics.get(name, 0.0) > before * times + more
    ]
