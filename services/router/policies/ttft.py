"""`ttft`: the smallest predicted time to first token. Pure."""

from __future__ import annotations

from services.router.candidates import Candidates
from services.router.policies.base import Parameters
from services.router.timing import pairs_of
from services.router.workers import Worker

__all__ = ["Ttft"]


class Ttft:
    """The smallest predicted time to first token, with a price on the work it adds.

    PREFILL, WHOLE   (wait + own) x (1 + 0.25/s x own), DECODE likewise

    Inputs: fitted times (`timing.py`), load reports and own placements, overlap from the index and predictions.
    Parameters: none yet.
    Limits: knows nothing of inter-token time yet.
    """

    temperature = 0.0
    predicts = True

    def __init__(self, parameters: Parameters) -> None:
        self._price = 0.25

    def score(self, candidates: Candidates) -> list[float]:
        """See the class."""
        prompt = candidates.prompt_tokens
        ttft = []
        scores = []
        for timing, queued, pairs, uncached in zip(
            candidates.timings, candidates.queued_tokens, candidates.queued_pairs, candidates.uncached, strict=True
        ):
            own = timing.per_token * uncached + timing.per_pair * pairs_of(uncached, prompt)
            wait = timing.base + queued * timing.per_token + pairs * timing.per_pair
            ttft.append(wait + own)
            scores.append((wait + own) * (1 + self._price * own))
        candidates.terms["ttft_s"] = ttft
        return scores

    def chosen(self, worker: Worker) -> None:
        """Nothing to remember."""
