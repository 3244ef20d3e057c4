"""`ttft`: the smallest predicted time to first token, at a price for the time it takes from others. Pure."""

from __future__ import annotations

from services.router.candidates import Candidates, Job
from services.router.policies.base import Parameters
from services.router.timing import pairs_of
from services.router.workers import Worker

__all__ = ["Ttft"]

_DELAYED_TOKENS = 0.06
"""What a second that an answer under way stands still counts, against a second of waiting for a first token."""
_ANSWER_TOKENS = 100
"""A decode worker is compared by the time to so many tokens."""
_BEHIND_S = 1e6
"""Who breaks a limit comes after all who keep to it, each limit apart."""
_GAP_WEIGHT = 0.02
"""Of one arrival in the mean time between two: about the last fifty count."""


class Ttft:
    """The smallest predicted time to first token, at a price for the time it takes from others.

    PREFILL, WHOLE   ttft + own x rate x ttft + own x 0.06 x requests, in seconds, with
                     wait = base + per_token x queued_tokens + per_pair x queued_pairs
                     own  = per_token x uncached_tokens + per_pair x pairs of these with the tokens before them
                     ttft = wait + own
                     rate = requests that come a second and worker: those who will come before `ttft` is over wait `own`
                     longer for it; the tokens of those running there come later, which is worth less
    DECODE           transfer + 100 x step, with
                     transfer = transfer_base + transfer_per_token x uncached_tokens
                     step     = step_base + step_per_request x (requests + 1) + step_per_block x (kv_blocks + needed)

    Constraints: a worker that would have less than `kv_headroom` of its blocks left, or (WHOLE, DECODE) whose predicted
    step is over `max_itl_ms`, comes after all that keep to it. Remote prefill is taken only where PREFILL's
    score and the transfer are less than the WHOLE score of the best decode worker, what it would cost there, or where
    that worker would have more than a third of its KV blocks in use.
    Inputs: fitted times of each worker (`timing.py`), load reports and own placements, overlap from the index and
    predictions, own arrivals.
    Parameters: kv_headroom (0.05), max_itl_ms (0: no limit).
    Limits: until a worker of a kind has been measured all are taken to be equally fast. Queues are as old as the last
    report, at most a second. The fit takes a worker's decoding into account only as far as it is part of its usual
    prefill speed. The rate is of this router's own arrivals; several routers each see their part of it.
    Source: own; the price is what a first come, first served queue adds to those behind.
    """

    temperature = 0.0
    predicts = True

    def __init__(self, parameters: Parameters) -> None:
        self._most_used = 1.0 - parameters.kv_headroom
        self._max_itl_s = parameters.max_itl_s
        self._gaps: dict[Job, float] = {}
        """Mean time between two arrivals."""
        self._last: dict[Job, float] = {}

    def score(self, candidates: Candidates) -> list[float]:
        """See the class."""
        scores = self._decode(candidates) if candidates.job is Job.DECODE else self._prefill(candidates)
        most_used = self._most_used
        rows = zip(candidates.workers, candidates.kv_blocks, candidates.fits, strict=True)
        for at, (worker, blocks, fit) in enumerate(rows):
            if blocks + fit.needed > most_used * worker.total_blocks and worker.total_blocks:
                scores[at] += _BEHIND_S
        if self._max_itl_s and candidates.job is not Job.PREFILL:
            for at, step_s in enumerate(_steps(candidates)):
                if step_s > self._max_itl_s:
                    scores[at] += _BEHIND_S
        return scores

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """An arrival."""
        last = self._last.get(job)
        if last is not None:
            gap = self._gaps.get(job, now - last)
            self._gaps[job] = gap + _GAP_WEIGHT * (now - last - gap)
        self._last[job] = now

    def _prefill(self, candidates: Candidates) -> list[float]:
        prompt = candidates.prompt_tokens
        gap = self._gaps.get(candidates.job, 0.0)
        rate = 1.0 / (gap * len(candidates)) if gap > 0 else 0.0
        waits, owns, scores = [], [], []
        for timing, queued, queued_pairs, fit, requests in zip(
            candidates.timings, candidates.queued_tokens, candidates.queued_pairs, candidates.fits,
            candidates.requests, strict=True,
        ):  # fmt: skip
            uncached = fit.uncached
            per_token, per_pair = timing.per_token, timing.per_pair
            wait = timing.base + per_token * queued + per_pair * queued_pairs
            own = per_token * uncached + per_pair * pairs_of(uncached, prompt)
            ttft = wait + own
            waits.append(wait)
            owns.append(own)
            scores.append(ttft + own * (rate * ttft + _DELAYED_TOKENS * requests))
        candidates.terms = {"wait_s": waits, "own_s": owns}
        return scores

    def _decode(self, candidates: Candidates) -> list[float]:
        rows = zip(candidates.timings, candidates.fits, strict=True)
        transfers = [timing.transfer_s(fit.uncached) for timing, fit in rows]
        steps = _steps(candidates)
        candidates.terms = {"transfer_s": transfers, "step_s": steps}
        return [transfer + _ANSWER_TOKENS * step for transfer, step in zip(transfers, steps, strict=True)]


def _steps(candidates: Candidates) -> list[float]:
    """Predicted inter-token time with the request."""
    rows = zip(candidates.timings, candidates.requests, candidates.kv_blocks, candidates.fits, strict=True)
    return [timing.step_s(requests + 1, blocks + fit.needed) for timing, requests, blocks, fit in rows]
