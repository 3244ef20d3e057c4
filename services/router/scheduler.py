"""Places a request: filter, score, choose, and remember. Pure: no gRPC, no asyncio, the clock passed in."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from controlplane.instances import State
from kvcache.index import KvIndex
from services.router.placements import Book, Load, Share
from services.router.policies import Job, Policy, Score
from services.router.predictions import Predictions
from services.router.workers import Pool, Roster, Worker

__all__ = ["Candidate", "Decision", "Explanation", "NoRoom", "Request", "Scheduler"]

RETRY_AFTER_S = 1.0
"""Advice to a request that nobody can serve now: about what a worker takes to be seen READY."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a router is told of a request."""

    request_id: str
    model: str
    block_hashes: Sequence[int]
    prompt_tokens: int
    excluded: Collection[str] = ()
    """Instances not to use."""
    avoided: Collection[str] = ()
    """Instances to use only when no other can serve."""
    max_tokens: int = 0
    """Most tokens the answer may have; 0: unknown."""
    priority: int = 0
    tenant: str = ""
    lora: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a worker's labels must say."""
    capabilities: Collection[str] = ()
    """What a worker must be capable of."""
    session_id: str = ""
    session_hard: bool = False
    """The session's worker or nobody, as long as that worker lives."""
    pinned: str = ""
    """This decode worker or nobody."""
    timeout_s: float = 0.0
    """Time the whole answer may take; 0: no limit."""


class NoRoom(Overloaded):
    """Every worker that could take the request is full now; it can be tried again when one has freed something."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as one request saw it."""

    worker: Worker
    score: float
    held_blocks: int
    """Leading prompt blocks it holds."""
    uncached_tokens: int
    """Prompt tokens it would have to compute."""
    needed_blocks: int
    """Blocks it would have to find room for, and decode to read from elsewhere."""
    load: Load
    """A copy."""


@dataclass(slots=True)
class Explanation:
    """All workers of the model, as a decision saw them."""

    candidates: list[Candidate] = field(default_factory=list)
    filtered: list[tuple[Worker, str]] = field(default_factory=list)
    """With the reason."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request."""

    decode: Candidate
    prefill: Candidate | None
    why: str
    explanation: Explanation | None
    """Where one was asked for."""

    @property
    def computes(self) -> Candidate:
        """Who computes the prompt."""
        return self.prefill or self.decode


class Scheduler:
    """Decides with what index, predictions, book and roster say, and enters each decision in book and predictions."""

    def __init__(
        self,
        policy: Policy,
        remote_prefill_min_tokens: int,
        *,
        roster: Roster,
        index: KvIndex,
        book: Book,
        predictions: Predictions,
        chance: random.Random,
    ) -> None:
        self._policy = policy
        self._remote_prefill_min_tokens = remote_prefill_min_tokens
        self._roster = roster
        self._index = index
        self._book = book
        self._predictions = predictions
        self._chance = chance

    def schedule(self, request: Request, now: float, *, may_wait: bool = False, explain: bool = False) -> Decision:
        """Raises `InvalidRequest`, `NotFound` (unknown model) or `Unavailable` (none of its workers can serve now).

        With `may_wait`, raises `NoRoom` and changes nothing while every worker for one of its jobs is full: as many
        requests as it runs at a time, or fewer KV blocks left than the request needs. Without, a full worker is taken
        where all are, and the request waits there. A worker with room is always taken before a full one.
        """
        if request.prompt_tokens < 1:
            raise InvalidRequest("prompt_tokens is 0; a prompt has at least one token", param="prompt_tokens")
        pool = self._roster.pool(request.model)
        if pool is None:
            known = ", ".join(self._roster.models) or "none"
            raise NotFound(f"no worker serves the model {request.model!r}; known: {known}", param="model")
        choice = pool.choice(request.excluded)
        if not choice.decode:
            raise Unavailable(
                f"no decode worker of {request.model!r} is ready ({_states(pool, request.excluded)}); try again",
                retry_after_s=RETRY_AFTER_S,
            )
        _check_hashes(request, choice.decode)
        explanation = Explanation() if explain else None
        overlaps = self._overlaps(request.block_hashes, now)
        job, decoders = (Job.DECODE, choice.paired) if choice.paired else (Job.WHOLE, choice.decode)
        decode = self._choose(job, decoders, request, overlaps, explanation)
        prefill = None
        if choice.paired and self._is_remote(decode.uncached_tokens):
            prefillers = [worker for worker in choice.prefill if worker.format is decode.worker.format]
            prefill = self._choose(Job.PREFILL, prefillers, request, overlaps, explanation)
        if explanation is not None:
            _add_filtered(explanation, pool, request.excluded)
        self._enter(request, decode, prefill, now)
        return Decision(decode, prefill, self._why(decode, prefill, bool(choice.paired), request), explanation)

    def _is_remote(self, uncached_tokens: int) -> bool:
        """At a minimum of 0 every prompt goes to a prefill worker, a wholly cached one too."""
        return not self._remote_prefill_min_tokens or uncached_tokens > self._remote_prefill_min_tokens

    def _overlaps(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        overlaps = self._index.overlaps(hashes)
        for instance_id, depth in self._predictions.overlaps(hashes, now).items():
            if depth > overlaps.get(instance_id, 0):
                overlaps[instance_id] = depth
        return overlaps

    def _choose(
        self,
        job: Job,
        workers: Sequence[Worker],
        request: Request,
        overlaps: Mapping[str, int],
        explanation: Explanation | None,
    ) -> Candidate:
        """The worker of the lowest score. The hot loop: a `Candidate` is made of the winner only, or to explain."""
        score_of, load_of, held_by = self._policy.score, self._book.load, overlaps.get
        prompt_tokens, hashes = request.prompt_tokens, len(request.block_hashes)
        best: list[tuple[Worker, Score, int, int, int, Load]] = []
        best_score: Score | None = None
        for worker in workers:
            block_size = worker.format.block_size
            full_blocks = prompt_tokens // block_size
            held = held_by(worker.instance_id, 0) if hashes <= full_blocks else 0  # else of another block size
            uncached = prompt_tokens - held * block_size
            needed = full_blocks + 1 - held  # one more, for the answer to begin in
            load = load_of(worker.instance_id)
            score = score_of(job, worker, load, uncached, needed)
            if explanation is not None:
                explanation.candidates.append(Candidate(worker, score[0], held, uncached, needed, replace(load)))
            if best_score is None or score < best_score:
                best, best_score = [(worker, score, held, uncached, needed, load)], score
            elif score == best_score:
                best.append((worker, score, held, uncached, needed, load))
        worker, score, held, uncached, needed, load = best[0] if len(best) == 1 else self._chance.choice(best)
        self._policy.chosen(worker)
        return Candidate(worker, score[0], held, uncached, needed, replace(load))

    def _enter(self, request: Request, decode: Candidate, prefill: Candidate | None, now: float) -> None:
        decode_id = decode.worker.instance_id
        if prefill is None:
            share = Share(decode_id, decode.uncached_tokens, decode.needed_blocks, arrived_at=now)
            self._book.place(request.request_id, share, None, now)
        else:
            prefill_id = prefill.worker.instance_id
            self._book.place(
                request.request_id,
                Share(decode_id, 0, decode.needed_blocks, arrived_at=None),
                Share(prefill_id, prefill.uncached_tokens, prefill.needed_blocks, arrived_at=now),
                now,
            )
            self._predictions.add(prefill_id, request.block_hashes, now)
        self._predictions.add(decode_id, request.block_hashes, now)

    def _why(self, decode: Candidate, prefill: Candidate | None, could_be_remote: bool, request: Request) -> str:
        blocks = len(request.block_hashes)
        where = f"{decode.worker.instance_id} decodes ({decode.held_blocks} of {blocks} blocks held)"
        if prefill is not None:
            return f"{where}; {prefill.worker.instance_id} prefills ({prefill.held_blocks} of {blocks} blocks held)"
        if could_be_remote:
            return (
                f"{where} and prefills: {decode.uncached_tokens} uncached tokens are not more than"
                f" remote_prefill_min_tokens = {self._remote_prefill_min_tokens}"
            )
        return f"{where} and prefills: no usable prefill worker"


def _check_hashes(request: Request, workers: Sequence[Worker]) -> None:
    """Raises `InvalidRequest` for more hashes than the prompt can have blocks."""
    hashes, tokens = len(request.block_hashes), request.prompt_tokens
    if all(hashes > tokens // worker.format.block_size for worker in workers):
        raise InvalidRequest(
            f"{hashes} block_hashes for {tokens} prompt_tokens in blocks of {workers[0].format.block_size};"
            " give one a full block",
            param="block_hashes",
        )


def _states(pool: Pool, excluded: Collection[str]) -> str:
    workers = pool.of_role("decode")
    return ", ".join(f"{worker.instance_id} is {_unfit(worker, excluded)}" for worker in workers) or "there is none"


def _unfit(worker: Worker, excluded: Collection[str]) -> str:
    return "excluded" if worker.instance_id in excluded else str(worker.state)


def _add_filtered(explanation: Explanation, pool: Pool, excluded: Collection[str]) -> None:
    considered = {candidate.worker.instance_id for candidate in explanation.candidates}
    for worker in pool.workers:
        if worker.instance_id not in considered:
            reason = _unfit(worker, excluded)
            if reason == State.READY:
                reason = "no remote prefill, or no pair of equal KV formats"
            explanation.filtered.append((worker, reason))
