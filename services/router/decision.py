"""What was decided for a request, all that it was decided on, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.router.candidates import Candidate, Candidates
from services.router.request import Request
from services.router.workers import Pool, Worker

__all__ = ["Decision", "Outcome"]


@dataclass(slots=True)
class Outcome:
    """What is known so far of a placed request."""

    cached_tokens: int | None = None
    """Prompt tokens that whoever computed the prompt found in its cache."""
    prefill_s: float | None = None
    """Time that the remote prefill took, queue included."""
    ttft_s: float | None = None
    completion_tokens: int | None = None
    """Set when the request has left its workers."""
    told: bool = False
    """Whether `history.py` has handed it on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request. Holds what it was made from by reference: nothing of that is changed later."""

    request: Request
    at: float
    pool: Pool
    only: str
    """The one decode worker that pinning or a session left."""
    seen: Sequence[Candidates]
    """Every comparison that was made."""
    decode: Candidate
    prefill: Candidate | None
    local_because: str
    """Why decode computes the prompt itself; empty: it does not."""
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def computes(self) -> Candidate:
        """Who computes the prompt."""
        return self.prefill or self.decode

    @property
    def predicted_ttft_s(self) -> float:
        """From when it was placed; 0: no worker of this kind has been measured yet."""
        predicted_s = self.computes.predicted_ttft_s
        return predicted_s + self.decode.predicted_transfer_s if predicted_s and self.prefill else predicted_s

    @property
    def why(self) -> str:
        """A sentence for a person."""
        blocks = len(self.request.block_hashes)
        where = f"{self.decode.worker.instance_id} decodes ({self.decode.held_blocks} of {blocks} blocks held)"
        if self.prefill is None:
            return f"{where} and prefills: {self.local_because}"
        prefill = self.prefill
        return f"{where}; {prefill.worker.instance_id} prefills ({prefill.held_blocks} of {blocks} blocks held)"

    def compared(self) -> Iterator[Candidate]:
        """Every worker in every comparison."""
        for candidates in self.seen:
            for at in range(len(candidates)):
                yield Candidate(candidates, at)

    def filtered(self) -> Iterator[tuple[Worker, str]]:
        """Workers of the model that were not compared, and why."""
        considered = {worker.instance_id for candidates in self.seen for worker in candidates.workers}
        for worker in self.pool.workers:
            if worker.instance_id not in considered:
                yield worker, self.pool.passed_over(worker, self.request, self.only)
