"""`lmetric`: work to be done before us, times those we share the worker with. Pure."""

from __future__ import annotations

from services.router.candidates import Candidates, Job
from services.router.policies.base import Parameters
from services.router.workers import Worker

__all__ = ["Lmetric"]


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

    temperature = 0.0
    predicts = False

    def __init__(self, parameters: Parameters) -> None:
        """Reads none."""

    def score(self, candidates: Candidates) -> list[float]:
        """See the class."""
        if candidates.job is Job.DECODE:
            columns = zip(candidates.requests, candidates.kv_blocks, candidates.fits, strict=True)
            return [(requests + 1) * (blocks + fit.needed) for requests, blocks, fit in columns]
        block = candidates.workers[0].format.block_size
        rows = zip(candidates.queued_tokens, candidates.fits, candidates.requests, strict=True)
        return [
            (queued + (fit.uncached if fit.uncached > block else block)) * (requests + 1)
            for queued, fit, requests in rows
        ]

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """Nothing to remember."""
