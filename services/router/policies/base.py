"""What a policy is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.router.candidates import Candidates, Job
from services.router.workers import Worker

__all__ = ["Parameters", "Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a user may tune; each policy says which of these it reads."""

    overlap_weight: float = 1.0
    temperature: float = 0.0
    kv_headroom: float = 0.05
    max_itl_s: float = 0.0
    """0: no limit."""


class Policy(Protocol):
    """Chooses among workers; may remember what it chose."""

    temperature: float
    """0: the lowest score is taken, among equals the one that holds most of the prompt, among those one at random.
    Else one is drawn with the softmax of the negative scores, put on a range of 1, over this."""

    predicts: bool
    """Whether PREFILL and WHOLE scores are seconds: then remote prefill is taken only where it costs fewer, with the
    transfer, once speeds have been measured."""

    def score(self, candidates: Candidates) -> list[float]:
        """A score for each, lower is better. Scores of different jobs are compared only if it `predicts`."""

    def chosen(self, job: Job, worker: Worker, now: float) -> None:
        """This one was taken."""
