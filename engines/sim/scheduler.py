"""What a simulated engine does in each step: continuous batching over a pool of KV blocks, as vLLM's scheduler does it.

Pure: it neither waits nor looks at a clock; `now` is whatever clock the caller keeps, in seconds, and a step says how
long it takes. The engine runs it in real time, a simulation of a cluster in virtual time.

- Running sequences come first, each with one new token or the next chunk of its prompt; then waiting ones are admitted,
  by priority and arrival, while there is room for all of their present tokens.
- A prompt's full blocks are looked up in the prefix cache; its last token is always computed, so that there is
  something to sample from.
- When blocks run out, the last in order is preempted: its blocks are freed, its tokens computed again later.
- Only full blocks travel between workers: the reader computes what follows the last full block before the prompt's end.
- Steps that only decode, one like the other, can be had in one go (`coast`): what makes a simulation fast.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.base import FinishReason, KvOutcome, LoadSnapshot
from engines.sim.pool import BlockPool
from engines.sim.profile import Profile
from engines.sim.sequence import Sequence, Stage
from kvcache.events import KvEvent

__all__ = ["Coast", "Hold", "Scheduler", "Step"]


@dataclass(slots=True)
class Step:
    """What one step did. All of it is true when `duration_s` has passed."""

    duration_ps: int = 0
    """Picoseconds."""
    emitted: list[tuple[Sequence, FinishReason | None]] = field(default_factory=list)
    """Who has a new last token, and why it ended if it did."""
    filled: list[tuple[int, int]] = field(default_factory=list)
    """Block and sequence hash of each block that is now full."""
    prefilled: list[Sequence] = field(default_factory=list)
    """To be given to `hold` or `drop`."""
    reads: list[Sequence] = field(default_factory=list)
    """To be read from another worker, into their blocks from `computed` on; then `finish_read`."""
    unneeded: list[Sequence] = field(default_factory=list)
    """Whose KV on another worker was in the own prefix cache."""

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.duration_ps / 1e12

    @property
    def did_nothing(self) -> bool:
        """Nothing will change before something comes from outside."""
        return not (self.duration_ps or self.reads or self.unneeded)


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks kept for one reader."""

    blocks: list[int]
    expires_at: float


@dataclass(frozen=True, slots=True)
class Coast:
    """Steps to come in which each running sequence has one more token and nothing else happens.

    A step takes `growth_ps` longer than the one before, as every context has grown by a token.
    """

    steps: int
    batch: int
    first_ps: int
    growth_ps: int

    def duration_ps(self, steps: int) -> int:
        """Of the first so many steps."""
        return steps * self.first_ps + self.growth_ps * (steps * (steps - 1) // 2)

    def begun(self, elapsed_ps: int) -> int:
        """Steps that have begun after so long, the first at 0."""
        if elapsed_ps >= self.duration_ps(self.steps):
            return self.steps
        low, high = 0, self.steps  # the first `low` steps are over, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            if self.duration_ps(middle) <= elapsed_ps:
                low = middle
            else:
                high = middle
        return high

    def first(self, steps: int) -> Coast:
        """Only so many of them."""
        return Coast(steps, self.batch, self.first_ps, self.growth_ps)

    def after(self, steps: int) -> Coast:
        """What is left then."""
        return Coast(self.steps - steps, self.batch, self.first_ps + steps * self.growth_ps, self.growth_ps)


class Scheduler:
    """Owns the block pool and all sequences."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        profile: Profile,
    ) -> None:
        self._pool = BlockPool(total_blocks)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._profile = profile
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        """A heap; those that ended meanwhile are dropped when they come up."""
        self._running: list[Sequence] = []
        """In order."""
        self._reading: set[Sequence] = set()
        """An aborted one stays until its transfer has ended."""
        self._adrift: list[list[int]] = []
        """Destinations of transfers that nobody waits for, and that have not ended."""
        self._holds: dict[str, Hold] = {}
        """In the order of their ends."""
        self._arrivals = 0
        self._steps = 0
        self._step_s = 0.0
        """Mean of recent steps: each counts a sixteenth."""
        self._holds_expired = 0
        self._stuck = False
        """Who waits found no room, and nothing has changed since that could give it some."""

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Queues it. Its request id must be unknown here, and `end_at` tokens must fit in all blocks together."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._sequences[sequence.request_id] = sequence
        heapq.heappush(self._waiting, sequence)
        self._stuck = False

    @property
    def running(self) -> list[Sequence]:
        """Who runs, in order; for reading."""
        return self._running

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def abort(self, request_id: str) -> Sequence | None:
        """Stops it in whatever stage and frees its blocks, those of a read in flight excepted. None: not known."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        return sequence

    # Steps

    def step(self, now: float) -> Step:
        """Decides and does the next step. It is in the past for the next call, whenever that comes."""
        self._expire(now)
        step = Step()
        scheduled, budget, preempted = self._schedule_running()
        if not preempted or not scheduled:
            self._admit(step, scheduled, budget)
        self._compute(step, scheduled)
        return step

    def _schedule_running(self) -> tuple[list[tuple[Sequence, int]], int, bool]:
        """Who of those running computes how many tokens; what is left of the step's tokens; whether one had to go."""
        scheduled: list[tuple[Sequence, int]] = []
        budget = self._max_batched_tokens
        preempted = False
        index = 0
        while index < len(self._running) and budget:
            sequence = self._running[index]
            count = min(sequence.length - sequence.computed, budget)
            missing = self._missing_blocks(sequence, sequence.computed + count)
            if missing > self._pool.available:
                self._preempt(self._running[-1])
                preempted = True
                continue
            for _ in range(missing):
                sequence.blocks.append(self._pool.allocate())
            scheduled.append((sequence, count))
            budget -= count
            index += 1
        return scheduled, budget, preempted

    def _admit(self, step: Step, scheduled: list[tuple[Sequence, int]], budget: int) -> None:
        while self._waiting and budget:
            if len(self._running) + len(self._reading) >= self._max_num_seqs:
                self._stuck = True
                return
            sequence = self._waiting[0]
            if sequence.stage is Stage.ENDED:
                heapq.heappop(self._waiting)
                continue
            if not self._take_blocks(sequence):
                if self._running or self._reading or not self._strip_last_waiting():
                    self._stuck = True
                    return
                continue
            heapq.heappop(self._waiting)
            if sequence.handle_blocks:
                if sequence.handle_blocks * self._block_size > sequence.computed:
                    sequence.stage = Stage.READING
                    self._reading.add(sequence)
                    step.reads.append(sequence)
                    continue
                sequence.handle_blocks = 0
                sequence.kv_outcome = KvOutcome.LOCAL
                step.unneeded.append(sequence)
            sequence.stage = Stage.RUNNING
            insort(self._running, sequence)
            count = min(sequence.length - sequence.computed, budget)
            scheduled.append((sequence, count))
            budget -= count

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Gives it blocks for all of its present tokens, those that the cache has first; or nothing, and False."""
        found: list[int] = []
        if not sequence.blocks:
            found = self._pool.find(sequence.hashes, (sequence.length - 1) // self._block_size)
        missing = self._missing_blocks(sequence, sequence.length) - len(found)
        if missing > self._pool.available - self._pool.idle_among(found):
            return False
        if found:
            self._pool.share(found)
            sequence.blocks.extend(found)
            sequence.computed = len(found) * self._block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        for _ in range(missing):
            sequence.blocks.append(self._pool.allocate())
        return True

    def _compute(self, step: Step, scheduled: list[tuple[Sequence, int]]) -> None:
        prefilled_tokens = prefilled_pairs = decoding = context = 0
        size = self._block_size
        for sequence, count in scheduled:
            if count == 1:
                decoding += 1
                context += sequence.computed
            else:
                prefilled_tokens += count
                prefilled_pairs += count * sequence.computed + count * (count - 1) // 2
            before = sequence.computed // size
            sequence.computed += count
            after = sequence.computed // size
            if after > before:
                self._fill(step, sequence, before, after)
            if sequence.computed < sequence.length:
                continue
            if sequence.prefill_only:
                sequence.stage = Stage.PREFILLED
                self._running.remove(sequence)
                step.prefilled.append(sequence)
                continue
            finish = sequence.next_token()
            step.emitted.append((sequence, finish))
            if finish is not None:
                self._end(sequence)
        if scheduled:
            step.duration_ps = self._profile.step_ps(prefilled_tokens, prefilled_pairs, decoding, context)
            self._steps += 1
            self._step_s += (step.duration_s - self._step_s) / 16

    def _fill(self, step: Step, sequence: Sequence, first: int, end: int) -> None:
        """Blocks `first` to `end` of a sequence are now full."""
        self._stuck = False
        sequence.hash_up_to(end)
        hashes = sequence.hashes
        blocks, named = sequence.blocks[first:end], hashes[first:end]
        step.filled.extend(zip(blocks, named, strict=True))
        self._pool.publish(hashes[first - 1] if first else None, blocks, named)

    def _missing_blocks(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self._block_size) - len(sequence.blocks))

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._strip(sequence)
        sequence.stage = Stage.WAITING
        heapq.heappush(self._waiting, sequence)

    def _strip(self, sequence: Sequence) -> None:
        self._stuck = False
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _strip_last_waiting(self) -> bool:
        """When nothing runs and the first in line finds no room, those behind it give up the blocks they have read."""
        holders = [s for s in self._waiting if s.blocks and s is not self._waiting[0]]
        if holders:
            self._strip(max(holders))
        return bool(holders)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.stage is Stage.RUNNING:
            self._running.remove(sequence)
        if sequence.stage is not Stage.READING:
            self._strip(sequence)
        sequence.stage = Stage.ENDED

    # Many steps at once

    def coast(self, most: int = 1 << 30) -> Coast | None:
        """The next steps, as far as they only decode: no prompt, no end, no block that fills or is allocated.

        For sequences that end at their `end_at` and whose tokens are only counted (`Sequence.counted`).
        """
        running = self._running
        if not running or len(running) > self._max_batched_tokens:
            return None
        if self._holds or (self._waiting and not self._stuck):
            return None
        size = self._block_size
        context = 0
        for sequence in running:
            computed = sequence.computed
            length = sequence.length
            if length - computed != 1 or length == sequence.prompt_tokens or not sequence.counted:
                return None  # the last token of a prompt gives a first token, which somebody waits for
            room = min(len(sequence.blocks), computed // size + 1) * size - computed - 1
            left = sequence.end_at - length - 1
            if left < room:
                room = left
            if room < most:
                if room < 1:
                    return None
                most = room
            context += computed
        batch = len(running)
        first = self._profile.step_ps(0, 0, batch, context)
        return Coast(most, batch, first, self._profile.step_ps(0, 0, batch, context + batch) - first)

    def advance(self, coast: Coast, steps: int) -> None:
        """Does the first `steps` steps of what `coast` promised. Nothing may have happened since."""
        for sequence in self._running:
            sequence.computed += steps
            sequence.length += steps
        self._steps += steps
        # The mean of a series that grows evenly trails 15 growths behind; the distance to that shrinks by 1/16 a step.
        growth_s, last_s = coast.growth_ps / 1e12, (coast.first_ps + (steps - 1) * coast.growth_ps) / 1e12
        distance = self._step_s - (coast.first_ps - coast.growth_ps) / 1e12 + 15 * growth_s
        self._step_s = last_s - 15 * growth_s + distance * 0.9375**steps

    # Reads from other workers

    def finish_read(self, sequence: Sequence, outcome: KvOutcome) -> None:
        """The transfer has ended. With READ its blocks hold what they should; else their content is not looked at."""
        self._reading.discard(sequence)
        self._stuck = False
        if sequence.stage is Stage.ENDED:
            self._strip(sequence)
            return
        self._back_in_line(sequence, outcome)
        if outcome is not KvOutcome.READ:
            self._strip(sequence)
            return
        first, end = sequence.computed // self._block_size, sequence.handle_blocks
        sequence.handle_blocks = 0
        sequence.remote_tokens = (end - first) * self._block_size
        sequence.computed = end * self._block_size
        parent = sequence.hashes[first - 1] if first else None
        self._pool.publish(parent, sequence.blocks[first:end], sequence.hashes[first:end])

    def abandon_read(self, sequence: Sequence, outcome: KvOutcome) -> list[int]:
        """Nobody waits for the transfer any longer, but it has not ended: give the blocks to `reclaim` when it has."""
        self._reading.discard(sequence)
        self._stuck = False
        blocks, sequence.blocks = sequence.blocks, []
        self._adrift.append(blocks)
        sequence.computed = 0
        if sequence.stage is not Stage.ENDED:
            self._back_in_line(sequence, outcome)
        return blocks

    def reclaim(self, blocks: list[int]) -> None:
        """The transfer into these blocks has ended."""
        self._adrift.remove(blocks)
        self._stuck = False
        self._pool.free(blocks)

    def _back_in_line(self, sequence: Sequence, outcome: KvOutcome) -> None:
        sequence.kv_outcome = outcome
        if outcome is not KvOutcome.READ:
            sequence.cached_tokens = None  # what the cache has by the time it is computed here is what counts
            sequence.handle_blocks = 0
        sequence.stage = Stage.WAITING
        heapq.heappush(self._waiting, sequence)

    # Blocks held for readers

    def readable_blocks(self, prompt_tokens: int) -> int:
        """How many blocks of such a prompt travel: the full ones before its last token."""
        return (prompt_tokens - 1) // self._block_size

    def hold(self, sequence: Sequence, handle_id: str, expires_at: float) -> None:
        """Keeps a prefilled sequence's readable blocks. `expires_at` never decreases from call to call."""
        count = self.readable_blocks(sequence.prompt_tokens)
        self._holds[handle_id] = Hold(sequence.blocks[:count], expires_at)
        sequence.blocks = sequence.blocks[count:]
        self._end(sequence)

    def release(self, handle_id: str) -> bool:
        """Ends a hold. False: there is none (any more)."""
        hold = self._holds.pop(handle_id, None)
        if hold is not None:
            self._stuck = False
            self._pool.free(hold.blocks)
        return hold is not None

    def next_expiry(self) -> float | None:
        """When the first hold ends by itself."""
        return next(iter(self._holds.values())).expires_at if self._holds else None

    def _expire(self, now: float) -> None:
        while self._holds:
            handle_id, hold = next(iter(self._holds.items()))
            if hold.expires_at > now:
                return
            self.release(handle_id)
            self._holds_expired += 1

    # The whole

    def drain_events(self) -> list[KvEvent]:
        """KV events since the last call, in order."""
        return self._pool.drain_events()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. False: some are in use, nothing was done."""
        return self._pool.clear()

    def load(self) -> LoadSnapshot:
        """How busy it is now. Costs time in proportion to the requests."""
        waiting = [s for s in self._waiting if s.stage is Stage.WAITING]
        queued = sum(s.length - s.computed for s in waiting)
        for s in self._running:
            left = s.length - s.computed
            if left > 1:  # else it decodes
                queued += left
        return LoadSnapshot(
            running_requests=len(self._running) + len(self._reading),
            waiting_requests=len(waiting),
            queued_prefill_tokens=queued,
            kv_used_blocks=self._pool.in_use,
            kv_total_blocks=self._pool.total,
            kv_leased_blocks=sum(len(hold.blocks) for hold in self._holds.values()),
            step_time_s=self._step_s,
            steps=self._steps,
            kv_leases=len(self._holds),
            kv_leases_expired=self._holds_expired,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` when blocks leaked, are used twice or are counted wrong. For tests; slow."""
        self._pool.check_integrity(self._users())
        assert sorted(self._running) == self._running
        for sequence in self._sequences.values():
            assert sequence.computed <= len(sequence.blocks) * self._block_size
            assert sequence.computed <= sequence.length

    def _users(self) -> Iterator[list[int]]:
        for sequence in {*self._sequences.values(), *self._reading}:
            yield sequence.blocks
        yield from self._adrift
        for hold in self._holds.values():
            yield hold.blocks
