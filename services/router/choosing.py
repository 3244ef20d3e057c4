"""Takes the best of some workers for one job, by a policy's scores, as long as there is room. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.errors import Overloaded
from kvcache.index import Overlaps
from services.router.candidates import Candidate, Candidates, Job, gather
from services.router.placements import Book
from services.router.policies import Policy
from services.router.request import Request
from services.router.timing import Timings
from services.router.workers import Group

__all__ = ["Ask", "Chooser", "NoRoom"]

RETRY_AFTER_S = 1.0


class NoRoom(Overloaded):
    """Every worker that could take the request is full now; it can be tried again when one has freed something."""


@dataclass(slots=True)
class Ask:
    """One request, and what is asked about it again for each job."""

    request: Request
    now: float
    overlaps: Overlaps
    """Leading blocks that each worker holds, or soon will."""
    home: str
    """The decode worker that its session is at; empty: none."""
    may_wait: bool
    seen: list[Candidates] = field(default_factory=list)
    """Every comparison made, in order."""


class Chooser:
    """Compares; changes nothing but its chance."""

    def __init__(
        self, policy: Policy, book: Book, timings: Timings, chance: random.Random, backlog: float = 0.0
    ) -> None:
        """`backlog`: requests that a worker may be given beyond those it runs, as a part of these."""
        self._policy = policy
        self._backlog = backlog
        self._book = book
        self._timings = timings
        self._chance = chance

    def choose(self, job: Job, group: Group, ask: Ask) -> Candidate:
        """The best of the group. Raises `NoRoom` where all are full, their backlogs too, and the request may wait.

        Full is a worker with as many requests as it runs at a time, or with fewer KV blocks left than the request
        needs; an idle one never is. One with room is taken before any that is full, the session's own before others.
        """
        request = ask.request
        candidates = gather(
            job, group, ask.overlaps, len(request.block_hashes), request.prompt_tokens, self._book, self._timings
        )
        scores = candidates.scores = self._policy.score(candidates)
        ask.seen.append(candidates)
        home = group.position.get(ask.home, -1) if job is not Job.PREFILL else -1
        best = home if home >= 0 else self._best(candidates, range(len(scores)))
        if not _has_room(candidates, best):
            roomy = [at for at in range(len(scores)) if _has_room(candidates, at)]
            if not roomy and ask.may_wait and self._backlog:
                roomy = [at for at in range(len(scores)) if _has_room(candidates, at, self._backlog)]
            if roomy:
                best = self._best(candidates, roomy)
            elif ask.may_wait:
                full = "1 worker is full" if len(scores) == 1 else f"all {len(scores)} workers are full"
                raise NoRoom(f"{full} that could {job} for {request.model!r}", retry_after_s=RETRY_AFTER_S)
        candidates.chosen = best
        return Candidate(candidates, best)

    def _best(self, candidates: Candidates, among: Sequence[int]) -> int:
        """The lowest score, then the most blocks held, then chance; or a draw, where the policy has a temperature."""
        scores = candidates.scores
        some = scores if len(among) == len(scores) else [scores[at] for at in among]
        if self._policy.temperature > 0:
            return self._draw(among, some)
        lowest = min(some)
        if some.count(lowest) == 1:
            return among[some.index(lowest)]
        equals = [at for at in among if scores[at] == lowest]
        fits = candidates.fits
        most = max(fits[at].held for at in equals)
        return self._chance.choice([at for at in equals if fits[at].held == most])

    def _draw(self, among: Sequence[int], scores: Sequence[float]) -> int:
        low, high = min(scores), max(scores)
        scale = (high - low) * self._policy.temperature or 1.0
        return self._chance.choices(among, [math.exp((low - score) / scale) for score in scores])[0]


def _has_room(candidates: Candidates, at: int, backlog: float = 0.0) -> bool:
    worker, requests = candidates.workers[at], candidates.requests[at]
    if not requests:
        return True
    if worker.max_num_seqs and requests >= worker.max_num_seqs * (1 + backlog):
        return False
    return not worker.total_blocks or candidates.kv_blocks[at] + candidates.fits[at].needed <= worker.total_blocks
