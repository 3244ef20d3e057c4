"""Places a request: filter, score, choose, and remember. Pure: no gRPC, no asyncio, the clock passed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.errors import InvalidRequest, NotFound, Unavailable
from controlplane.instances import State
from kvcache.index import KvIndex
from services.router.placements import Book, Share
from services.router.policies import Candidate, Job, Policy
from services.router.predictions import Predictions
from services.router.workers import Pool, Roster, Worker

__all__ = ["Decision", "Request", "Scheduler", "Seen"]

RETRY_AFTER_S = 1.0
"""Advice to a request that nobody can serve now: about what a worker takes to be seen READY."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a router is told of a request."""

    request_id: str
    model: str
    block_hashes: Sequence[int]
    prompt_tokens: int
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker as it was when the decision was made."""

    instance_id: str
    role: str
    score: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    filtered: str = ""
    """Why it was no candidate; empty: it was."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request."""

    decode: Candidate
    prefill: Candidate | None
    uncached_tokens: int
    """Prompt tokens that the prefill worker, or else the decode worker, has to compute."""
    why: str
    seen: list[Seen]
    """All workers of the model, where an explanation was asked for."""


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

    def schedule(self, request: Request, now: float, *, explain: bool = False) -> Decision:
        """Raises `InvalidRequest`, `NotFound` (unknown model) or `Unavailable` (none of its workers can serve now)."""
        if request.prompt_tokens < 1:
            raise InvalidRequest("prompt_tokens is 0; a prompt has at least one token", param="prompt_tokens")
        pool = self._roster.pool(request.model)
        if pool is None:
            raise NotFound(
                f"no worker serves the model {request.model!r}; known: {', '.join(self._roster.models) or 'none'}",
                param="model",
            )
        decoders = _usable(pool.decode, request.excluded)
        if not decoders:
            raise Unavailable(
                f"no decode worker of {request.model!r} is ready ({_states(pool, request.excluded)}); try again",
                retry_after_s=RETRY_AFTER_S,
            )
        overlaps = self._overlaps(request.block_hashes, now)
        prefillers = _usable(pool.prefill, request.excluded)
        formats = {worker.format for worker in prefillers}
        paired = [worker for worker in decoders if worker.format in formats]
        job = Job.DECODE if paired else Job.WHOLE
        decode, decode_scores = self._choose(job, paired or decoders, request, overlaps)
        prefill, prefill_scores = None, list[tuple[Candidate, float]]()
        if paired and decode.uncached_tokens >= self._least_remote():
            compatible = [worker for worker in prefillers if worker.format is decode.worker.format]
            prefill, prefill_scores = self._choose(Job.PREFILL, compatible, request, overlaps)
        seen = _explain(pool, decode_scores + prefill_scores, request.excluded) if explain else []
        self._enter(request, decode, prefill, now)
        return Decision(
            decode=decode,
            prefill=prefill,
            uncached_tokens=(prefill or decode).uncached_tokens,
            why=self._why(decode, prefill, bool(paired), request),
            seen=seen,
        )

    def _least_remote(self) -> int:
        """The fewest uncached tokens that go to a prefill worker: more than the minimum, but at 0 all prompts."""
        return self._remote_prefill_min_tokens + 1 if self._remote_prefill_min_tokens else 0

    def _overlaps(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        overlaps = self._index.overlaps(hashes)
        for instance_id, depth in self._predictions.overlaps(hashes, now).items():
            if depth > overlaps.get(instance_id, 0):
                overlaps[instance_id] = depth
        return overlaps

    def _choose(
        self, job: Job, workers: Sequence[Worker], request: Request, overlaps: dict[str, int]
    ) -> tuple[Candidate, list[tuple[Candidate, float]]]:
        """The best, and all with their scores."""
        policy, load_of = self._policy, self._book.load
        scored: list[tuple[Candidate, float]] = []
        best: list[Candidate] = []
        best_score = None
        for worker in workers:
            block_size = worker.format.block_size
            held = overlaps.get(worker.instance_id, 0)
            candidate = Candidate(
                worker,
                load_of(worker.instance_id),
                held,
                max(0, request.prompt_tokens - held * block_size),
                # One more than the prompt fills, for the answer to begin in.
                request.prompt_tokens // block_size + 1 - held,
            )
            score = policy.score(job, candidate)
            scored.append((candidate, score[0]))
            if best_score is None or score < best_score:
                best, best_score = [candidate], score
            elif score == best_score:
                best.append(candidate)
        choice = best[0] if len(best) == 1 else self._chance.choice(best)
        policy.chosen(choice.worker)
        return choice, scored

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


def _usable(workers: Sequence[Worker], excluded: frozenset[str]) -> list[Worker]:
    """Those that are READY; where none is, those that have only gone quiet: better them than nobody."""
    allowed = [worker for worker in workers if worker.instance_id not in excluded] if excluded else workers
    ready = [worker for worker in allowed if worker.state is State.READY]
    return ready or [worker for worker in allowed if worker.state is State.SUSPECT]


def _states(pool: Pool, excluded: frozenset[str]) -> str:
    return ", ".join(f"{worker.instance_id} is {_unfit(worker, excluded)}" for worker in pool.decode) or "there is none"


def _unfit(worker: Worker, excluded: frozenset[str]) -> str:
    return "excluded" if worker.instance_id in excluded else str(worker.state)


def _explain(pool: Pool, scored: Sequence[tuple[Candidate, float]], excluded: frozenset[str]) -> list[Seen]:
    seen = [
        Seen(
            candidate.worker.instance_id,
            candidate.worker.role,
            score,
            {
                "held_blocks": candidate.held_blocks,
                "uncached_tokens": candidate.uncached_tokens,
                "needed_blocks": candidate.needed_blocks,
                "requests": candidate.load.requests,
                "queued_tokens": candidate.load.queued_tokens,
                "kv_blocks": candidate.load.kv_blocks,
            },
        )
        for candidate, score in scored
    ]
    considered = {one.instance_id for one in seen}
    for worker in (*pool.prefill, *pool.decode):
        if worker.instance_id not in considered:
            reason = _unfit(worker, excluded)
            seen.append(
                Seen(
                    worker.instance_id,
                    worker.role,
                    filtered=reason if reason != State.READY else "no remote prefill, or no pair of equal KV formats",
                )
            )
    return seen
