"""`linear`: the cost of NVIDIA Dynamo's KV router. Pure."""

from __future__ import annotations

from services.router.candidates import Candidates, Job
from services.router.policies.base import Parameters
from services.router.workers import Worker

__all__ = ["Linear"]


class Linear:
    """The cost of NVIDIA Dynamo's KV router, for those who come from there.

    PREFILL, WHOLE   overlap_weight x (queued_tokens + uncached_tokens) / block_size + kv_blocks + prompt blocks
    DECODE           kv_blocks + prompt blocks

    Inputs: load reports and own placements, overlap from the index and predictions.
    Parameters: overlap_weight (1; more favours caches and TTFT, less favours equal decode load and ITL), temperature
    (0: the lowest cost; else a draw, so that many routers do not all run to one worker).
    Limits: adds prompt blocks, a matter of compute, to resident blocks, a matter of memory: how much the one is worth
    in the other depends on model, hardware and traffic, which is what overlap_weight has to be tuned for. Dynamo counts
    blocks that running requests share once; a load report does too, an own placement until the next report does not.
    Source: ai-dynamo/dynamo, lib/kv-router, DefaultWorkerSelector: logit = overlap_weight x potential prefill blocks +
    potential decode blocks, softmax over the negated logits on a range of 1.
    """

    predicts = False

    def __init__(self, parameters: Parameters) -> None:
        self.temperature = parameters.temperature
        self._weight = parameters.overlap_weight

    def score(self, candidates: Candidates) -> list[float]:
        """See the class."""
        columns = zip(candidates.kv_blocks, candidates.fits, strict=True)
        resident = [blocks + fit.held + fit.needed for blocks, fit in columns]
        if candidates.job is Job.DECODE:
            return [float(blocks) for blocks in resident]
        weight = self._weight / candidates.workers[0].format.block_size
        rows = zip(candidates.queued_tokens, candidates.fits, resident, strict=True)
        return [weight * (queued + fit.uncached) + blocks for queued, fit, blocks in rows]

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """Nothing to remember."""
