"""The workers that one job of one request may go to, as columns: row `i` of each is `workers[i]`. Pure.

Columns, because a decision looks at every worker: plain lists of numbers are scored, compared and kept for an
explanation at a tenth of what an object each costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvcache.events import Tier
from kvcache.index import Overlap, Overlaps
from services.router.placements import Book, Load, Pulled, Share
from services.router.timing import Timing, Timings, pairs_of
from services.router.workers import Group, Worker

__all__ = ["Candidate", "Candidates", "Fit", "Job", "gather"]


class Job(StrEnum):
    """What a worker is wanted for."""

    PREFILL = "prefill"
    """Compute the prompt, and hand its KV on."""
    DECODE = "decode"
    """Take the prompt's KV from a prefill worker, and generate."""
    WHOLE = "whole"
    """Compute the prompt and generate."""


class Fit(NamedTuple):
    """How a prompt fits a worker's cache. Workers that hold the same of it share one."""

    held: int
    """Leading prompt blocks it holds in any tier, or soon will."""
    uncached: int
    """Prompt tokens it would have to compute; loading from a slower tier counts as the tokens it takes as long as."""
    needed: int
    """Blocks it would have to find room for: one more than the prompt has, for the answer to begin in."""


@dataclass(slots=True)
class Candidates:
    """Gathered, scored by a policy, kept to explain the decision. Columns are never changed later."""

    job: Job
    prompt_tokens: int
    workers: Sequence[Worker]
    timings: Sequence[Timing]
    """Alive: they go on learning."""
    fits: list[Fit]
    requests: list[int]
    """There now; this and the next three as in `placements.Load`."""
    queued_tokens: list[int]
    queued_pairs: list[float]
    kv_blocks: list[int]
    lower: Mapping[int, Overlap]
    """By row: who holds some of its blocks below the engine's own memory only."""
    scores: list[float] = field(default_factory=list)
    terms: dict[str, list[float]] = field(default_factory=dict)
    """What else the policy went by."""
    chosen: int = -1

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def held(self) -> list[int]:
        """Of `fits`, made each time it is asked for, as are the next two."""
        return [fit.held for fit in self.fits]

    @property
    def uncached(self) -> list[int]:
        """Of `fits`."""
        return [fit.uncached for fit in self.fits]

    @property
    def needed(self) -> list[int]:
        """Of `fits`."""
        return [fit.needed for fit in self.fits]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row: a worker as one request saw it."""

    candidates: Candidates
    at: int

    @property
    def worker(self) -> Worker:
        """Which it is."""
        return self.candidates.workers[self.at]

    @property
    def score(self) -> float:
        """Lower was better."""
        return self.candidates.scores[self.at]

    @property
    def held_blocks(self) -> int:
        """Leading prompt blocks it holds, or soon will."""
        return self.candidates.fits[self.at].held

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens it would have to compute."""
        return self.candidates.fits[self.at].uncached

    @property
    def needed_blocks(self) -> int:
        """Blocks it would have to fill, or to read from elsewhere."""
        return self.candidates.fits[self.at].needed

    @property
    def used_after(self) -> float:
        """Part of its KV blocks in use once it has the request; 0: it does not say how many there are."""
        total = self.worker.total_blocks
        return (self.candidates.kv_blocks[self.at] + self.needed_blocks) / total if total else 0.0

    @property
    def load(self) -> Load:
        """What it had on its hands."""
        every, at = self.candidates, self.at
        return Load(every.requests[at], every.queued_tokens[at], every.kv_blocks[at], every.queued_pairs[at])

    @property
    def terms(self) -> dict[str, float]:
        """All that its score came from."""
        load = self.load
        return {
            "held_blocks": self.held_blocks,
            "uncached_tokens": self.uncached_tokens,
            "needed_blocks": self.needed_blocks,
            "requests": load.requests,
            "queued_tokens": load.queued_tokens,
            "kv_blocks": load.kv_blocks,
        } | {name: column[self.at] for name, column in self.candidates.terms.items()}

    @property
    def predicted_ttft_s(self) -> float:
        """Its queue and this prompt; 0: no worker of its kind was measured yet."""
        timing, load, uncached = self.candidates.timings[self.at], self.load, self.uncached_tokens
        if not timing.is_measured:
            return 0.0
        pairs = pairs_of(uncached, self.candidates.prompt_tokens)
        return timing.prefill_s(load.queued_tokens + uncached, load.queued_pairs + pairs)

    @property
    def predicted_transfer_s(self) -> float:
        """For what it does not hold to come from a prefill worker, and its first step."""
        return self.candidates.timings[self.at].transfer_s(self.uncached_tokens)

    def share(self, *, computes: bool, arrived_at: float | None) -> Share:
        """What the request puts on this worker."""
        load, uncached, prompt = self.load, self.uncached_tokens, self.candidates.prompt_tokens
        overlap = self.candidates.lower.get(self.at)
        return Share(
            self.worker.instance_id,
            uncached if computes else 0,
            self.needed_blocks,
            arrived_at,
            pairs=pairs_of(uncached, prompt) if computes else 0.0,
            moved_tokens=0 if computes else uncached,
            ahead_tokens=load.queued_tokens,
            ahead_pairs=load.queued_pairs,
            pulled=_pulled(overlap, self.worker.format.block_size, prompt) if overlap and computes else None,
        )


def _pulled(overlap: Overlap, block_size: int, prompt_tokens: int) -> Pulled:
    tier = max(_LOWER, key=lambda one: overlap[one - 1])
    return Pulled(tier, overlap[tier - 1] * block_size, prompt_tokens - overlap.blocks * block_size, prompt_tokens)


_LOWER = (Tier.HOST, Tier.DISK, Tier.PEER)


def gather(
    job: Job, group: Group, overlaps: Overlaps, blocks: int, prompt_tokens: int, book: Book, timings: Timings
) -> Candidates:
    """A prompt of `blocks` hashed blocks, held as `overlaps` says, before any worker of the group."""
    loads, times = group.refresh(book, timings)
    distinct, number = overlaps.distinct, overlaps.of.get
    if group.block_size:
        fits_of = _fits_of(distinct, blocks, prompt_tokens, group.block_size)
        fits = [fits_of[number(instance_id, 0)] for instance_id in group.ids]
    else:
        by_size = {size: _fits_of(distinct, blocks, prompt_tokens, size) for size in set(group.block_sizes)}
        rows = zip(group.ids, group.block_sizes, strict=True)
        fits = [by_size[size][number(instance_id, 0)] for instance_id, size in rows]
    lower: dict[int, Overlap] = {}
    if any(overlap.blocks != overlap.device for overlap in distinct):
        for at, instance_id in enumerate(group.ids):
            overlap, fit = distinct[number(instance_id, 0)], fits[at]
            if fit.held and overlap.blocks != overlap.device:
                lower[at] = overlap
                weight = times[at].tier_weight
                worth = sum(overlap[tier - 1] * weight(tier) for tier in _LOWER)
                fits[at] = fit._replace(uncached=fit.uncached - round(group.block_sizes[at] * worth))
    return Candidates(
        job,
        prompt_tokens,
        group.workers,
        times,
        fits,
        loads.requests,
        loads.queued_tokens,
        loads.queued_pairs,
        loads.kv_blocks,
        lower,
    )


def _fits_of(distinct: Sequence[Overlap], blocks: int, prompt_tokens: int, size: int) -> list[Fit]:
    """For each overlap, in blocks of so many tokens. What lies in lower tiers is to be taken off `uncached`."""
    needed = prompt_tokens // size + 1
    if blocks >= needed:  # hashes of another block size
        return [Fit(0, prompt_tokens, needed)] * len(distinct)
    return [Fit(one.blocks, prompt_tokens - one.device * size, needed - one.device) for one in distinct]
