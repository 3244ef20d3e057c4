"""How busy each worker is: its load reports, and the router's own placements that no report can know of yet. Pure.

A report says what was true on the worker a moment ago; it is right, but late. A placement counts from when it is made
until a report can include it. So what a report ever gets wrong, or a lost outcome leaves behind, lasts one interval.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvcache.events import Tier
from kvcache.load import LoadReport

__all__ = ["Book", "Load", "LoadColumns", "Placement", "Pulled", "Share"]

ON_THE_WAY_S = 0.1
"""A request that reached its worker less than this before a report came may not be in it."""
MOST_PLACEMENTS = 100_000
MOST_CHANGES = 10_000
"""Kept for those who follow; past it they look at every load again."""


@dataclass(slots=True)
class Load:
    """What a worker is believed to have on its hands."""

    requests: int = 0
    """Running and waiting."""
    queued_tokens: int = 0
    """Prompt tokens to compute."""
    kv_blocks: int = 0
    """In use."""
    queued_pairs: float = 0.0
    """Of those prompt tokens with the ones before them (see `timing.py`); an estimate where a report has the tokens."""


@dataclass(frozen=True, slots=True)
class LoadColumns:
    """Many workers' loads: item `i` of each is worker `i`'s."""

    requests: list[int]
    queued_tokens: list[int]
    kv_blocks: list[int]
    queued_pairs: list[float]

    @classmethod
    def of(cls, loads: Sequence[Load]) -> LoadColumns:
        """As they are now."""
        return cls(
            [load.requests for load in loads],
            [load.queued_tokens for load in loads],
            [load.kv_blocks for load in loads],
            [load.queued_pairs for load in loads],
        )

    def set(self, at: int, load: Load) -> None:
        """Worker `at` has this load now."""
        self.requests[at] = load.requests
        self.queued_tokens[at] = load.queued_tokens
        self.kv_blocks[at] = load.kv_blocks
        self.queued_pairs[at] = load.queued_pairs

    def copy(self) -> LoadColumns:
        """Apart from this."""
        return LoadColumns(self.requests[:], self.queued_tokens[:], self.kv_blocks[:], self.queued_pairs[:])


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a worker has to load from a slower tier before it computes the rest of a prompt."""

    tier: Tier
    """The one most comes from."""
    tokens: int
    """That come from there."""
    computed_tokens: int
    """That are in no tier."""
    prompt_tokens: int


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
    pairs: float = 0.0
    """Of these tokens with the ones before them."""
    moved_tokens: int = 0
    """Whose KV it has to read from elsewhere."""
    ahead_tokens: int = 0
    """Prompt tokens that were queued there before it."""
    ahead_pairs: float = 0.0
    pulled: Pulled | None = None


@dataclass(slots=True)
class Placement:
    """A request in flight."""

    placed_at: float
    decode: Share
    prefill: Share | None
    """None: done, or decode computes the prompt."""
    prefill_s: float = 0.0
    """What remote prefill took; 0: none, or not done."""
    frontend_id: str = ""
    """Who asked for it; empty: not told."""


@dataclass(slots=True)
class _Account:
    load: Load = field(default_factory=Load)
    shares: dict[str, Share] = field(default_factory=dict)
    """By request."""
    reported: tuple[int, int] = (0, 0)
    """Epoch and engine steps of its latest report."""


class Book:
    """Own placements in flight, and every worker's load. Times are a monotonic clock's, passed in."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._placements: dict[str, Placement] = {}
        """Oldest first."""
        self._accounts: dict[str, _Account] = {}
        self.generation = 0
        """Grows when a worker's load becomes another object, or `changed` begins anew."""
        self.changed: list[str] = []
        """Workers whose load changed in this generation, in that order. For reading."""

    def __len__(self) -> int:
        """Placements in flight."""
        return len(self._placements)

    def load(self, instance_id: str) -> Load:
        """The worker's load, for reading. The same object, kept true, until the worker is forgotten."""
        return self._account(instance_id).load

    def placement(self, request_id: str) -> Placement | None:
        """Of a request in flight."""
        return self._placements.get(request_id)

    def place(
        self, request_id: str, decode: Share, prefill: Share | None, now: float, *, frontend_id: str = ""
    ) -> None:
        """Counts a decision. One made earlier for the same request is void: it is placed again because that failed."""
        self._drop(request_id)
        self._placements[request_id] = Placement(now, decode, prefill, frontend_id=frontend_id)
        self._add(request_id, decode)
        if prefill is not None:
            self._add(request_id, prefill)
        self.expire(now)

    def asked_by(self, frontend_ids: Collection[str]) -> list[str]:
        """Requests in flight of these frontends. Looks at all there are."""
        return [request_id for request_id, one in self._placements.items() if one.frontend_id in frontend_ids]

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
        self.expire(now)  # also while nothing new is placed
        account = self._account(report.instance_id)
        if (report.epoch, report.steps) < account.reported:
            return  # overtaken on its way by a newer one
        account.reported = report.epoch, report.steps
        load = account.load
        load.requests = report.running_requests + report.waiting_requests
        # The report has no pairs: what is queued is taken to be made up as before.
        of_before = report.queued_prefill_tokens / load.queued_tokens if load.queued_tokens else 0.0
        load.queued_pairs *= min(of_before, 1.0)
        load.queued_tokens = report.queued_prefill_tokens
        load.kv_blocks = report.kv_used_blocks
        for share in account.shares.values():
            if share.arrived_at is None or share.arrived_at > now - ON_THE_WAY_S:
                _count(load, share, 1)
        self._note(report.instance_id)

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew."""
        if self._accounts.pop(instance_id, None) is not None:
            self._begin_generation()

    def expire(self, now: float) -> None:
        """Drops placements of which nothing was heard for too long, and the oldest past the bound."""
        while self._placements:
            request_id, oldest = next(iter(self._placements.items()))
            if now - oldest.placed_at < self._ttl_s and len(self._placements) <= MOST_PLACEMENTS:
                return
            self._drop(request_id)

    def _add(self, request_id: str, share: Share) -> None:
        account = self._account(share.instance_id)
        account.shares[request_id] = share
        _count(account.load, share, 1)
        self._note(share.instance_id)

    def _remove(self, request_id: str, share: Share) -> None:
        account = self._accounts.get(share.instance_id)
        if account is not None and account.shares.pop(request_id, None) is not None:
            _count(account.load, share, -1)
            self._note(share.instance_id)

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
            account.load.queued_pairs = max(0.0, account.load.queued_pairs - share.pairs)
            self._note(share.instance_id)
        share.tokens, share.pairs = 0, 0.0

    def _account(self, instance_id: str) -> _Account:
        account = self._accounts.get(instance_id)
        if account is None:
            account = self._accounts[instance_id] = _Account()
        return account

    def _note(self, instance_id: str) -> None:
        self.changed.append(instance_id)
        if len(self.changed) > MOST_CHANGES:
            self._begin_generation()

    def _begin_generation(self) -> None:
        self.generation += 1
        self.changed.clear()


def _count(load: Load, share: Share, sign: int) -> None:
    # Not below zero: a report may have seen the end of a request before its outcome came here.
    load.requests = max(0, load.requests + sign)
    load.queued_tokens = max(0, load.queued_tokens + sign * share.tokens)
    load.queued_pairs = max(0.0, load.queued_pairs + sign * share.pairs)
    load.kv_blocks = max(0, load.kv_blocks + sign * share.blocks)
