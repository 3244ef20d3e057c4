"""How a worker is chosen. A policy gives each candidate a score; the lowest wins, equals are drawn at random. Pure.

Every policy states its formula, what it reads, where it fails and where it comes from. Scores of different jobs are
never compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol

from services.router.placements import Load
from services.router.workers import Worker

__all__ = ["POLICIES", "Job", "Lmetric", "Policy", "RoundRobin", "Score"]

Score = tuple[float, float]
"""(score, what decides among equals)."""


class Job(Enum):
    """What a worker is wanted for."""

    PREFILL = auto()
    """Compute the prompt, and hand its KV on."""
    DECODE = auto()
    """Take the prompt's KV from a prefill worker, and generate."""
    WHOLE = auto()
    """Compute the prompt and generate."""


class Policy(Protocol):
    """Chooses among workers; may remember what it chose. Called for every worker of every request."""

    def score(self, job: Job, worker: Worker, load: Load, uncached_tokens: int, needed_blocks: int) -> Score:
        """Lower is better. `uncached_tokens` the worker would have to compute, `needed_blocks` to find room for."""

    def chosen(self, worker: Worker) -> None:
        """This one was taken."""


class Lmetric:
    """Work to be done before us, times those we share the worker with.

    PREFILL, WHOLE   (queued_tokens + max(uncached_tokens, block_size)) x (requests + 1)
    DECODE           (requests + 1) x (kv_blocks + needed_blocks), among equals the fewest blocks to move

    Inputs: load reports and own placements (`placements.py`), overlap from the index and predictions.
    Parameters: none, which is the point: a product has no weights to tune, they would cancel out in the comparison.
    Limits: at least one block counts as uncached, else a worker that holds all of a prompt would score 0 whatever its
    load. Requests count alike, however long their answers. Workers are taken to be equally fast.
    Source: Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
    arXiv:2603.15202 (new prefill tokens x batch size); the decode score is the same idea for a worker that computes no
    prompts, with KV room in the place of tokens.
    """

    def score(self, job: Job, worker: Worker, load: Load, uncached_tokens: int, needed_blocks: int) -> Score:
        """See the class."""
        if job is Job.DECODE:
            return (load.requests + 1) * (load.kv_blocks + needed_blocks), needed_blocks
        block_size = worker.format.block_size
        uncached = uncached_tokens if uncached_tokens > block_size else block_size
        return (load.queued_tokens + uncached) * (load.requests + 1), 0

    def chosen(self, worker: Worker) -> None:
        """Nothing to remember."""


class RoundRobin:
    """The one whose last turn is longest ago.

    Inputs: own decisions only. Parameters: none.
    Limits: blind to caches and load; several routers take turns each by themselves. For comparison and for models
    without prefix reuse.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def score(self, job: Job, worker: Worker, load: Load, uncached_tokens: int, needed_blocks: int) -> Score:
        """The number of its last turn; 0 for a worker that had none."""
        return self._last.get(worker.instance_id, 0), 0

    def chosen(self, worker: Worker) -> None:
        """Its turn."""
        self._turn += 1
        self._last.pop(worker.instance_id, None)
        self._last[worker.instance_id] = self._turn
        if len(self._last) > _MOST_REMEMBERED:
            del self._last[next(iter(self._last))]


_MOST_REMEMBERED = 10_000
"""Workers come and go under new names; those gone longest are forgotten."""

POLICIES: Mapping[str, Callable[[], Policy]] = {"lmetric": Lmetric, "round_robin": RoundRobin}
"""By the name in the settings."""
