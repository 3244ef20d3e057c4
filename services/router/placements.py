"""How busy each worker is: its load reports, and the router's own placements that no report can know of yet. Pure.

A report says what was true on the worker a moment ago; it is right, but late. A placement counts from when it is made
until a report can include it. So what a report ever gets wrong, or a lost outcome leaves behind, lasts one interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.load import LoadReport

__all__ = ["Book", "Load", "Share"]

ON_THE_WAY_S = 0.1
"""A request that reached its worker less than this before a report came may not be in it."""
MOST_PLACEMENTS = 100_000


@dataclass(slots=True)
class Load:
    """What a worker is believed to have on its hands."""

    requests: int = 0
    """Running and waiting."""
    queued_tokens: int = 0
    """Prompt tokens to compute."""
    kv_blocks: int = 0
    """In use."""


@dataclass(slots=True)
class Share:
    """What one placement puts on one worker."""

    instance_id: str
    tokens: int
    """Prompt tokens it has to compute."""
    blocks: int
    """KV blocks it has to find room for."""
    arrived_at: float | None
    """When the request reached the worker; None: it waits for its prefill elsewhere."""


@dataclass(slots=True)
class _Placement:
    placed_at: float
    decode: Share
    prefill: Share | None


@dataclass(slots=True)
class _Account:
    load: Load = field(default_factory=Load)
    shares: dict[str, Share] = field(default_factory=dict)
    """By request."""


class Book:
    """Own placements in flight, and every worker's load. Times are a monotonic clock's, passed in."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._placements: dict[str, _Placement] = {}
        """Oldest first."""
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Placements in flight."""
        return len(self._placements)

    def load(self, instance_id: str) -> Load:
        """The worker's present load, for reading."""
        account = self._accounts.get(instance_id)
        return account.load if account is not None else _IDLE

    def place(self, request_id: str, decode: Share, prefill: Share | None, now: float) -> None:
        """Counts a decision. One made earlier for the same request is void: it is placed again because that failed."""
        self._drop(request_id)
        self._placements[request_id] = _Placement(now, decode, prefill)
        self._add(request_id, decode)
        if prefill is not None:
            self._add(request_id, prefill)
        self.expire(now)

    def prefilled(self, request_id: str, now: float) -> None:
        """The prefill worker is done with it, and the request goes on to its decode worker."""
        placement = self._placements.get(request_id)
        if placement is not None and placement.prefill is not None:
            self._remove(request_id, placement.prefill)
            placement.prefill = None
            placement.decode.arrived_at = now

    def computed(self, request_id: str) -> None:
        """Its first token is out: no prompt token of it waits any more."""
        placement = self._placements.get(request_id)
        if placement is not None:
            self._settle_tokens(placement.decode)

    def freed(self, request_id: str) -> None:
        """The request left its workers."""
        self._drop(request_id)

    def report(self, report: LoadReport, now: float) -> None:
        """The worker's own word replaces what was believed, but for requests it cannot have seen."""
        account = self._accounts.setdefault(report.instance_id, _Account())
        load = account.load
        load.requests = report.running_requests + report.waiting_requests
        load.queued_tokens = report.queued_prefill_tokens
        load.kv_blocks = report.kv_used_blocks
        for share in account.shares.values():
            if share.arrived_at is None or share.arrived_at > now - ON_THE_WAY_S:
                _count(load, share, 1)

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew."""
        self._accounts.pop(instance_id, None)

    def expire(self, now: float) -> None:
        """Drops placements of which nothing was heard for too long, and the oldest past the bound."""
        while self._placements:
            request_id, oldest = next(iter(self._placements.items()))
            if now - oldest.placed_at < self._ttl_s and len(self._placements) <= MOST_PLACEMENTS:
                return
            self._drop(request_id)

    def _add(self, request_id: str, share: Share) -> None:
        account = self._accounts.setdefault(share.instance_id, _Account())
        account.shares[request_id] = share
        _count(account.load, share, 1)

    def _remove(self, request_id: str, share: Share) -> None:
        account = self._accounts.get(share.instance_id)
        if account is not None and account.shares.pop(request_id, None) is not None:
            _count(account.load, share, -1)

    def _drop(self, request_id: str) -> None:
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            self._remove(request_id, placement.decode)
            if placement.prefill is not None:
                self._remove(request_id, placement.prefill)

    def _settle_tokens(self, share: Share) -> None:
        account = self._accounts.get(share.instance_id)
        if account is not None:
            account.load.queued_tokens = max(0, account.load.queued_tokens - share.tokens)
        share.tokens = 0


_IDLE = Load()


def _count(load: Load, share: Share, sign: int) -> None:
    # Not below zero: a report may have seen the end of a request before its outcome came here.
    load.requests = max(0, load.requests + sign)
    load.queued_tokens = max(0, load.queued_tokens + sign * share.tokens)
    load.kv_blocks = max(0, load.kv_blocks + sign * share.blocks)
