"""Places a request: filter, score, choose, and remember. Pure: no gRPC, no asyncio, the clock passed in."""

from __future__ import annotations

import random
from collections.abc import Sequence

from controlplane.errors import InvalidRequest, NotFound, Unavailable
from kvcache.index import KvIndex, Overlap, Overlaps
from kvcache.load import LoadReport
from services.router.candidates import Candidate, Job
from services.router.choosing import Ask, Chooser, NoRoom
from services.router.decision import Decision
from services.router.history import History
from services.router.placements import Book, Share
from services.router.policies import Policy
from services.router.predictions import Predictions, sparse
from services.router.request import Request
from services.router.sessions import Sessions
from services.router.timing import Timings, pairs_of
from services.router.workers import Choice, Pool, Roster, Worker

__all__ = ["Decision", "NoRoom", "Request", "Scheduler"]

_BUSY_DECODE = 1 / 3
"""A decode worker with more of its KV blocks in use computes no prompts where a prefill worker could: each would hold
up all its answers, whose blocks then stay longer, until nobody has room. Found by simulation of 6 + 2 workers."""
RETRY_AFTER_S = 1.0
"""Advice to a request that nobody can serve now: about what a worker takes to be seen READY."""


class Scheduler:
    """Decides with what index, predictions, book, timings and roster say, and enters each decision in them."""

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
        timings: Timings | None = None,
        sessions: Sessions | None = None,
        history: History | None = None,
        worker_backlog: float = 0.0,
    ) -> None:
        self._policy = policy
        self._remote_prefill_min_tokens = remote_prefill_min_tokens
        self._roster = roster
        self._index = index
        self._book = book
        self._predictions = predictions
        self._timings = timings if timings is not None else Timings()
        self._sessions = sessions if sessions is not None else Sessions()
        self._history = history if history is not None else History(0)
        self._chooser = Chooser(policy, book, self._timings, chance, worker_backlog)

    # Decisions

    def schedule(self, request: Request, now: float, *, may_wait: bool = False) -> Decision:
        """Raises `InvalidRequest`, `NotFound` (unknown model) or `Unavailable` (none of its workers can serve now).

        With `may_wait`, raises `NoRoom` and changes nothing while every worker for one of its jobs is full: as many
        requests as it runs at a time, or fewer KV blocks left than the request needs. Without, a full worker is taken
        where all are, and the request waits there. A worker with room is always taken before a full one.
        """
        pool = self._pool(request)
        home = self._sessions.home(request.session_id, now) if request.session_id else ""
        only = request.pinned or (home if request.session_hard and pool.has(home) else "")
        choice = pool.choice(request, only)
        if not choice.decode.workers:
            raise Unavailable(
                f"no decode worker of {request.model!r} is ready ({_states(pool, request, only)}); try again",
                retry_after_s=RETRY_AFTER_S,
            )
        _check_hashes(request, choice.decode.workers)
        ask = Ask(request, now, self._overlaps(request.block_hashes, now), home, may_wait)
        if choice.paired.workers:
            decode, prefill, why = self._choose_pair(choice, ask)
        else:
            decode, prefill = self._chooser.choose(Job.WHOLE, choice.decode, ask), None
            why = "no usable prefill worker"
        decision = Decision(request, now, pool, only, ask.seen, decode, prefill, why)
        self._enter(decision)
        self._history.add(decision)
        return decision

    def uncached_tokens(self, request: Request, now: float) -> int:
        """The fewest prompt tokens that any worker would have to compute: what the request costs at best."""
        held = max(one.blocks for one in self._overlaps(request.block_hashes, now).distinct)
        blocks = len(request.block_hashes)
        return request.prompt_tokens - (request.prompt_tokens * held // blocks if blocks else 0)

    def backlog(self, request: Request) -> int:
        """Requests that workers begin before one that is placed now, where it has the fewest before it; 0: it is next.

        A decode worker begins as many as it runs at a time, a prefill worker one after another.
        """
        choice = self._pool(request).choice(request, request.pinned)
        before = 0
        if choice.paired.workers:
            loads = choice.prefill_for(choice.paired.workers[0]).refresh(self._book, self._timings)[0]
            before = len(loads.requests) * min(loads.requests)
        loads = choice.decode.refresh(self._book, self._timings)[0]
        rows = zip(loads.requests, choice.decode.workers, strict=True)
        beyond = min((requests - one.max_num_seqs for requests, one in rows if one.max_num_seqs), default=0)
        return before + len(loads.requests) * max(beyond, 0)

    def _pool(self, request: Request) -> Pool:
        if request.prompt_tokens < 1:
            raise InvalidRequest("prompt_tokens is 0; a prompt has at least one token", param="prompt_tokens")
        pool = self._roster.pool(request.model)
        if pool is None:
            known = ", ".join(self._roster.models) or "none"
            raise NotFound(f"no worker serves the model {request.model!r}; known: {known}", param="model")
        return pool

    def _overlaps(self, hashes: Sequence[int], now: float) -> Overlaps:
        """What each worker holds, or soon will."""
        overlaps = self._index.worker_overlaps(hashes)
        distinct, of = overlaps
        blocks = [one.blocks for one in distinct]
        for depth, names in self._predictions.depths(hashes, now):
            deeper = [name for name in names if depth > blocks[of.get(name, 0)]]
            if deeper:
                for name in deeper:
                    of[name] = len(distinct)
                distinct.append(Overlap(device=depth))
                blocks.append(depth)
        return overlaps

    def _choose_pair(self, choice: Choice, ask: Ask) -> tuple[Candidate, Candidate | None, str]:
        """Decode and prefill worker; no prefill worker, and why, where decode had better compute the prompt itself."""
        decode = self._chooser.choose(Job.DECODE, choice.paired, ask)
        least = self._remote_prefill_min_tokens
        if least and decode.uncached_tokens <= least:  # at 0 even a wholly cached prompt may go to a prefill worker
            tokens = decode.uncached_tokens
            return decode, None, f"{tokens} uncached tokens are not more than remote_prefill_min_tokens = {least}"
        prefill = self._chooser.choose(Job.PREFILL, choice.prefill_for(decode.worker), ask)
        if not self._policy.predicts or not prefill.predicted_ttft_s:
            return decode, prefill, ""
        local = self._chooser.choose(Job.WHOLE, choice.paired, ask)
        local_s, remote_s = local.score, prefill.score + decode.predicted_transfer_s
        if remote_s < local_s or local.used_after > _BUSY_DECODE:
            return decode, prefill, ""
        return local, None, f"it costs {local_s:.3f} s here, {remote_s:.3f} s by remote prefill, as predicted"

    def _enter(self, decision: Decision) -> None:
        request, now = decision.request, decision.at
        decode, prefill = decision.decode.worker, decision.prefill
        some_hashes = sparse(request.block_hashes)
        if prefill is None:
            share = decision.decode.share(computes=True, arrived_at=now)
            self._book.place(request.request_id, share, None, now, frontend_id=request.frontend_id)
        else:
            decode_share = decision.decode.share(computes=False, arrived_at=None)
            prefill_share = prefill.share(computes=True, arrived_at=now)
            self._book.place(request.request_id, decode_share, prefill_share, now, frontend_id=request.frontend_id)
            self._predictions.add_sparse(prefill.worker.instance_id, some_hashes, now)
            self._policy.chosen(Job.PREFILL, prefill.worker, now)
        self._predictions.add_sparse(decode.instance_id, some_hashes, now)
        self._policy.chosen(decision.decode.candidates.job, decode, now)
        if request.session_id:
            self._sessions.settle(request.session_id, decode.instance_id, now)

    # What came of them

    def prefilled(self, request_id: str, now: float, elapsed_s: float = 0.0, cached_tokens: int | None = None) -> None:
        """The prefill worker is done after so long, its queue included; the request goes on to its decode worker."""
        placement = self._book.placement(request_id)
        if placement is not None and placement.prefill is not None:
            share = placement.prefill
            placement.prefill_s = elapsed_s
            self._learn_prefill(share, elapsed_s)
        self._book.prefilled(request_id, now)
        decision = self._history.find(request_id)
        if decision is not None:
            decision.outcome.prefill_s = elapsed_s
            decision.outcome.cached_tokens = cached_tokens

    def first_token(self, request_id: str, now: float, ttft_s: float = 0.0) -> None:
        """Its first token is out, so long after the request came."""
        placement = self._book.placement(request_id)
        if placement is not None:
            share = placement.decode
            # Waits before it was placed, and earlier tries, are not this worker's.
            since_s = min(ttft_s, now - placement.placed_at)
            timing = self._timings.known(share.instance_id)
            if not placement.prefill_s:
                self._learn_prefill(share, since_s)
            elif timing is not None:
                timing.learn_transfer(share.moved_tokens, since_s - placement.prefill_s)
        self._book.computed(request_id)
        decision = self._history.find(request_id)
        if decision is not None:
            decision.outcome.ttft_s = ttft_s

    def _learn_prefill(self, share: Share, seconds: float) -> None:
        timing, pulled = self._timings.known(share.instance_id), share.pulled
        if timing is None or not share.tokens:
            return
        if pulled is None:
            timing.learn_prefill(share.ahead_tokens + share.tokens, share.ahead_pairs + share.pairs, seconds)
        elif timing.is_measured:
            computed = pulled.computed_tokens
            pairs = pairs_of(computed, pulled.prompt_tokens)
            compute_s = timing.prefill_s(share.ahead_tokens + computed, share.ahead_pairs + pairs)
            timing.learn_load(pulled.tier, pulled.tokens, max(0.0, seconds - compute_s))

    def freed(self, request_id: str, cached_tokens: int | None = None, completion_tokens: int | None = None) -> None:
        """The request left its workers."""
        self._book.freed(request_id)
        decision = self._history.find(request_id)
        if decision is not None:
            outcome = decision.outcome
            outcome.completion_tokens = completion_tokens
            if decision.prefill is None:
                outcome.cached_tokens = cached_tokens
            self._history.ended(request_id)

    def report(self, report: LoadReport, now: float) -> None:
        """A worker says how busy it is."""
        self._book.report(report, now)
        only_decodes = report.running_requests and not (report.waiting_requests or report.queued_prefill_tokens)
        timing = self._timings.known(report.instance_id)
        if timing is not None and only_decodes and report.step_time_us:
            timing.learn_step(report.running_requests, report.kv_used_blocks, report.step_time_us / 1e6)

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew: nothing that was placed there runs any more."""
        self._book.forget(instance_id)
        self._predictions.forget(instance_id)
        self._timings.forget(instance_id)


def _check_hashes(request: Request, workers: Sequence[Worker]) -> None:
    """Raises `InvalidRequest` for more hashes than the prompt can have blocks."""
    hashes, tokens = len(request.block_hashes), request.prompt_tokens
    if hashes > tokens // workers[0].format.block_size and all(
        hashes > tokens // worker.format.block_size for worker in workers
    ):
        raise InvalidRequest(
            f"{hashes} block_hashes for {tokens} prompt_tokens in blocks of {workers[0].format.block_size};"
            " give one a full block",
            param="block_hashes",
        )


def _states(pool: Pool, request: Request, only: str) -> str:
    workers = pool.of_role("decode")
    return ", ".join(f"{one.instance_id} is {pool.unfit(one, request, only)}" for one in workers) or "there is none"
