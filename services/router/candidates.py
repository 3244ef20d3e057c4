"""The workers that one job of one request may go to, as columns: row `i` of each is `workers[i]`. Pure.

Columns, because a decision looks at every worker: plain lists of numbers are scored, compared and kept for an
explanation at a tenth of what an object each costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from kvcache.events import Tier
from kvcache.index import Overlap
from services.router.placements import Book, Load, Pulled, Share
from services.router.timing import Timing, Timings, pairs_of
from services.router.workers import Group, Worker

__every_ = ["Candidate", "Candidates", "Job", "gather"]


class Job(StrEnum):
    """What a worker is wanted for."""

    PREFILL = "prefill"
    """Compute the prompt, and hand its KV on."""
    DECODE = "decode"
    """Take the prompt's KV from a prefill worker, and generate."""
    WHOLE = "whole"
    """Compute the prompt and generate."""


@dataclass(slots=True)
class Candidates:
    """Gathered, scored by a policy, kept to explain the decision. Columns are never changed later."""

    job: Job
    prompt_tokens: int
    workers: Sequence[Worker]
    timings: Sequence[Timing]
    """Alive: they go on learning."""
    held: list[int]
    """Leading prompt blocks each holds in any tier, or soon will."""
    uncached: list[int]
    """Prompt tokens it would have to compute; loading from a slower tier counts as the tokens it takes as long as."""
    needed: list[int]
    """Blocks it would have to find room for."""
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
        return self.candidates.held[self.at]

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens it would have to compute."""
        return self.candidates.uncached[self.at]

    @property
    def needed_blocks(self) -> int:
        """Blocks it would have to fill, or to read from elsewhere."""
        return self.candidates.needed[self.at]

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
_REQUESTS, _TOKENS = attrgetter("requests"), attrgetter("queued_tokens")
_PAIRS, _BLOCKS = attrgetter("queued_pairs"), attrgetter("kv_blocks")


def gather(
    job: Job,
    group: Group,
    overlaps: Mapping[str, Overlap],
    blocks: int,
    prompt_tokens: int,
    book: Book,
    timings: Timings,
) -> Candidates:
    """A prompt of `blocks` hashed blocks, held as `overlaps` says, before any worker of the group."""
    loads, times = group.refresh(book, timings)
    size = group.block_size
    count = len(group.workers)
    held = [0] * count
    uncached = [prompt_tokens] * count
    sizes = [size] if size else group.block_sizes
    needed = [prompt_tokens // each + 1 for each in sizes] * (count if size else 1)
    # One more than the prompt has: for the answer to begin in.
    lower: dict[int, Overlap] = {}
    position = group.position.get
    alike: Overlap | None = None
    depth = computed = found_room = 0
    for instance_id, overlap in overlaps.items():
        at = position(instance_id)
        if at is None:
            continue
        if overlap is not alike or not size:  # the index names workers with equal overlaps in a row
            block_size = group.block_sizes[at]
            if blocks > prompt_tokens // block_size:
                continue  # hashes of another block size
            alike = overlap if overlap.blocks == overlap.device else None
            depth, found_room = overlap.blocks, prompt_tokens // block_size + 1 - overlap.device
            computed = prompt_tokens - overlap.device * block_size
            if alike is None:
                weight = times[at].tier_weight
                computed -= round(block_size * sum(overlap[tier - 1] * weight(tier) for tier in _LOWER))
                lower[at] = overlap
        held[at], uncached[at], needed[at] = depth, computed, found_room
    return Candidates(
        job,
        prompt_tokens,
        group.workers,
        times,
        held,
        uncached,
        needed,
        list(map(_REQUESTS, loads)),
        list(map(_TOKENS, loads)),
        list(map(_PAIRS, loads)),
        list(map(_BLOCKS, loads)),
        lower,
    )
