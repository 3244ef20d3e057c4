"""`round_robin` and `least_loaded`: what does not look at caches. Pure."""

from __future__ import annotations

from services.router.candidates import Candidates, Job
from services.router.policies.base import Parameters
from services.router.workers import Worker

__all__ = ["LeastLoaded", "RoundRobin"]

_MOST_REMEMBERED = 10_000
"""Workers come and go under new names; those gone longest are forgotten."""


class RoundRobin:
    """The one whose last turn is longest ago.

    Inputs: own decisions only.
    Parameters: none.
    Limits: blind to caches and load; several routers take turns each by themselves. For comparison, and for models
    without prefix reuse whose requests are alike.
    """

    temperature = 0.0
    predicts = False

    def __init__(self, parameters: Parameters) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def score(self, candidates: Candidates) -> list[float]:
        """The number of its last turn; 0 for a worker that had none."""
        last = self._last.get
        return [last(worker.instance_id, 0) for worker in candidates.workers]

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """Its turn."""
        self._turn += 1
        self._last.pop(worker.instance_id, None)
        self._last[worker.instance_id] = self._turn
        if len(self._last) > _MOST_REMEMBERED:
            del self._last[next(iter(self._last))]


class LeastLoaded:
    """The one with the fewest requests, running and waiting.

    Inputs: load reports and own placements.
    Parameters: none.
    Limits: blind to caches, and to how long prompts and answers are. Among equals the scheduler prefers who holds most
    of the prompt, so an idle deployment does use its caches.
    """

    temperature = 0.0
    predicts = False

    def __init__(self, parameters: Parameters) -> None:
        """Reads none."""

    def score(self, candidates: Candidates) -> list[float]:
        """Requests."""
        return [float(requests) for requests in candidates.requests]

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """Nothing to remember."""
