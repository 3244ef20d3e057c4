"""The latest decisions, and what came of them: for `Explain`, and for a log that can be replayed. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.router.candidates import Candidates
from services.router.decision import Decision

__all__ = ["Comparison", "DecisionRecord", "History", "record"]

MOST_ROWS = 500_000
"""Compared workers remembered in all, about 100 bytes each: with many workers fewer decisions are kept."""


class Comparison(msgspec.Struct, frozen=True):
    """Workers compared for one job, as columns: item `i` of each belongs to `workers[i]`."""

    job: str
    """"prefill", "decode" or "whole" (prefill and decode)."""
    chosen: int
    workers: list[str]
    block_sizes: list[int]
    held: list[int]
    uncached: list[int]
    needed: list[int]
    requests: list[int]
    queued_tokens: list[int]
    queued_pairs: list[float]
    kv_blocks: list[int]
    scores: list[float]
    terms: dict[str, list[float]]
    """What else the policy went by."""


class DecisionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision with all that it was made from: a line of the decisions log. Holds hashes, never tokens or text."""

    request_id: str
    at_s: float
    """On the router's monotonic clock."""
    policy: str
    model: str
    prompt_tokens: int
    block_hashes: list[int]
    compared: list[Comparison]
    decode: str
    prefill: str = ""
    local_because: str = ""
    """Why decode computes the prompt itself; empty: it does not."""
    predicted_ttft_s: float = 0.0
    max_tokens: int = 0
    filtered: dict[str, str] = {}
    """Workers that were not compared, and why."""
    cached_tokens: int | None = None
    """What whoever computed the prompt really found in its cache; this and the next: unset where nobody said."""
    prefill_s: float | None = None
    """Of a remote prefill, queue included."""
    ttft_s: float | None = None
    completion_tokens: int | None = None


class History:
    """Keeps a bounded number of decisions. `on_done` is given each when its request has ended or it is dropped."""

    def __init__(self, most: int, on_done: Callable[[Decision], None] | None = None) -> None:
        self._most = most
        self._on_done = on_done
        self._decisions: dict[str, Decision] = {}
        """By request, the oldest first."""
        self._rows = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """A decision was made. One made earlier for the same request is dropped."""
        if not self._most:
            return
        self._drop(decision.request.request_id)
        self._decisions[decision.request.request_id] = decision
        self._rows += _rows(decision)
        while len(self._decisions) > self._most or (self._rows > MOST_ROWS and len(self._decisions) > 1):
            self._drop(next(iter(self._decisions)))

    def find(self, request_id: str) -> Decision | None:
        """The latest decision for this request."""
        return self._decisions.get(request_id)

    def ended(self, request_id: str) -> None:
        """The request has left its workers."""
        decision = self._decisions.get(request_id)
        if decision is not None and not decision.outcome.told:
            self._tell(decision)

    def close(self) -> None:
        """Tells of those that have not ended, too."""
        while self._decisions:
            self._drop(next(iter(self._decisions)))

    def _drop(self, request_id: str) -> None:
        decision = self._decisions.pop(request_id, None)
        if decision is not None:
            self._rows -= _rows(decision)
            if not decision.outcome.told:
                self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        decision.outcome.told = True
        if self._on_done is not None:
            self._on_done(decision)


def record(decision: Decision, policy: str) -> DecisionRecord:
    """A decision in full."""
    request, outcome = decision.request, decision.outcome
    return DecisionRecord(
        request_id=request.request_id,
        at_s=decision.at,
        policy=policy,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        block_hashes=list(request.block_hashes),
        compared=[_comparison(candidates) for candidates in decision.seen],
        decode=decision.decode.worker.instance_id,
        prefill=decision.prefill.worker.instance_id if decision.prefill is not None else "",
        local_because=decision.local_because,
        predicted_ttft_s=decision.predicted_ttft_s,
        max_tokens=request.max_tokens,
        filtered={worker.instance_id: reason for worker, reason in decision.filtered()},
        cached_tokens=outcome.cached_tokens,
        prefill_s=outcome.prefill_s,
        ttft_s=outcome.ttft_s,
        completion_tokens=outcome.completion_tokens,
    )


def _comparison(candidates: Candidates) -> Comparison:
    return Comparison(
        candidates.job,
        candidates.chosen,
        [worker.instance_id for worker in candidates.workers],
        [worker.format.block_size for worker in candidates.workers],
        candidates.held,
        candidates.uncached,
        candidates.needed,
        candidates.requests,
        candidates.queued_tokens,
        candidates.queued_pairs,
        candidates.kv_blocks,
        candidates.scores,
        candidates.terms,
    )


def _rows(decision: Decision) -> int:
    return sum(len(candidates) for candidates in decision.seen)
