"""Who holds which block, in which tier: the router's index over all workers.

    index = KvIndex()
    holder = index.open("worker-1")              # one per instance and data-parallel rank
    index.apply(holder, Stored(None, (1, 2, 3))) # or through a `Follower`
    index.held([1, 2, 3, 4])                     # {"worker-1": Overlap(device=3)}

Blocks stand in runs (`runs.py`). A run's holders are an int with a hex digit for each holder and in it a bit for each
tier. A match goes from run to run of the prompt, so its cost grows with the number of distinct overlap depths, not
with blocks or workers, and it is exact whatever holes there are: a hole is a run that a holder is not in.

Memory is bounded. When full, the runs least recently matched or stored make room, the end of a chain first. What makes
room is forgotten, never invented: a holder's `xor` and `count` go on counting it, so that its load reports still agree.

Pure, not thread safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import xor
from typing import NamedTuple

from kvcache.events import Cleared, KvEvent, Removed, Stored, Tier
from kvcache.lanes import Holder, Lanes
from kvcache.runs import Run, Runs, chain

__all__ = ["DEFAULT_MAX_BLOCKS", "Holder", "KvIndex", "Match", "Overlap", "Overlaps"]

DEFAULT_MAX_BLOCKS = 10_000_000
"""About 1 GB."""
HAND_STEPS = 256
"""Runs the clock's hand looks at before it takes the next one, used or not."""


class Overlap(NamedTuple):
    """The leading blocks of a prompt that a worker holds in some tier, each counted in its fastest."""

    device: int = 0
    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.device + self.host + self.disk + self.peer


class Overlaps(NamedTuple):
    """What each worker holds of a prompt. Far fewer overlaps are distinct than there are workers."""

    distinct: list[Overlap]
    """The first is that of workers that hold none."""
    of: dict[str, int]
    """Which of them is a worker's; those that hold none may be left out."""


Match = list[tuple[Overlap, int]]
"""(overlap, the lanes that have exactly this one), fewest blocks first; lanes without any are left out."""


class KvIndex:
    """Which holder has which block, in which tier. Matches are answered for routed holders."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.runs = Runs()
        """For reading."""
        self.lanes = Lanes()
        """For reading."""
        self.forgotten = 0
        """Blocks that had to make room, or found none, since the start."""
        self.changes = 0
        """Grows with every change."""
        self._max_blocks = max_blocks
        self._hand = 0
        self._dead = 0
        """All four bits of closed holders whose bits still stand in runs."""
        self._sweeping = 0
        """Those of them that go as `_sweep_at` nears 0."""
        self._sweep_at = 0

    def __len__(self) -> int:
        """Distinct blocks, those of closed holders not yet swept included."""
        return len(self.runs.by_hash)

    # Holders

    def open(self, name: str, dp_rank: int = 0, *, routed: bool = True) -> Holder:
        """A new, empty part of the index. `routed=False`: invisible to matches until `route`."""
        return Holder(name, dp_rank, routed)

    def route(self, holder: Holder) -> None:
        """From now on matches see it."""
        holder.routed = True
        self.lanes.routed |= holder.lane

    def close(self, holder: Holder) -> None:
        """Forgets all it holds, in constant time; its bits are swept out as other blocks come, or by `tidy`."""
        self.changes += 1
        self._dead |= self.lanes.leave(holder)

    # Changes

    def apply(self, holder: Holder, event: KvEvent) -> None:
        """Takes one event of a holder. Repeats and removals of what is not held change nothing."""
        match event:
            case Stored(parent, hashes, tier):
                self.store(holder, parent, hashes, tier)
            case Removed(hashes, tier):
                self.remove(holder, hashes, tier)
            case Cleared():
                self.clear(holder)

    def clear(self, holder: Holder) -> None:
        """It holds nothing any more. Constant time."""
        self.close(holder)

    def store(self, holder: Holder, parent: int | None, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """`hashes[0]` follows `parent` (None: it begins a prompt), each next one the one before."""
        bit = self.lanes.enter(holder, tier)
        by_hash = self.runs.by_hash
        self.changes += 1
        at, end = 0, len(hashes)
        while at < end:
            run = self._swept(hashes[at])
            if run is None:
                stop = self._end_of_new(hashes, at)
                new = hashes if stop - at == end else hashes[at:stop]
                self._make_room(len(new))
                fitting = self._max_blocks - len(by_hash)
                checksum = reduce(xor, new, 0)
                if fitting < len(new):
                    checksum_kept = reduce(xor, new[:fitting], 0)
                    self._forget(holder, len(new) - fitting, checksum ^ checksum_kept)
                    self.forgotten += len(new) - fitting
                    new = new[:fitting]
                if new:
                    self.runs.add(parent, new, bit)
                holder.count += stop - at
                holder.xor ^= checksum
            else:
                start = run.hashes.index(hashes[at]) if run.hashes[0] != hashes[at] else 0
                stop = at + _common(run, start, hashes, at)
                if not run.holders & bit:
                    holder.count += stop - at
                    holder.xor ^= reduce(xor, hashes[at:stop])
                    self.runs.change(run, start, start + stop - at, run.holders | bit, parent)
            parent = hashes[stop - 1]
            at = stop
        if self._dead or self._sweeping:
            self.tidy(4 * end + 64)

    def remove(self, holder: Holder, hashes: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """These blocks are gone from that tier of this holder."""
        if not holder.count:
            return
        bit = holder.bit(tier)
        get = self.runs.by_hash.get
        self.changes += 1
        for block in hashes:
            run = self._swept(block) if self._sweeping else get(block)
            if run is not None and run.holders & bit:
                last = len(run.hashes) - 1
                at = last if run.hashes[last] == block else run.hashes.index(block)
                if at == last and run.holders == bit:
                    self.runs.drop_last(run, block)
                else:
                    self.runs.change(run, at, at + 1, run.holders & ~bit)
            elif holder.forgotten:  # the holder knows that it had it
                self._forget(holder, -1, block)
            else:
                continue
            holder.xor ^= block
            holder.count -= 1

    def discard(self, run: Run) -> None:
        """Forgets a damaged run; its holders must be told anew."""
        self.changes += 1
        self.runs.discard(run)

    def tidy(self, budget: int) -> bool:
        """Takes closed holders' bits out of about `budget` blocks. False: there is nothing to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead = self._dead, 0
            self._sweep_at = len(self.runs.all)
        runs, keep = self.runs, ~self._sweeping
        while self._sweep_at and budget > 0:
            # From the end: what takes the place of a run that goes has been looked at. New runs are made of swept ones.
            self._sweep_at = min(self._sweep_at, len(runs.all)) - 1
            if self._sweep_at < 0:
                self._sweep_at = 0
                break
            run = runs.all[self._sweep_at]
            budget -= 8
            if run.holders & ~keep:
                budget -= len(run.hashes)
                self.changes += 1
                runs.change(run, 0, len(run.hashes), run.holders & keep)
        if not self._sweep_at:
            self.lanes.free(self._sweeping)
            self._sweeping = 0
        return True

    # Questions

    def match(self, hashes: Sequence[int]) -> Match:
        """How many leading blocks of a prompt each routed holder has, by lane."""
        get = self.runs.by_hash.get
        run = get(hashes[0]) if hashes else None
        if run is not None and run.holders & self.lanes.tiered:
            return self._match_tiers(hashes)
        found: Match = []
        current = self.lanes.routed
        at, end = 0, len(hashes)
        while run is not None:
            run.used = True
            left = current & run.holders
            if left != current:
                if at:
                    found.append((Overlap(at), current & ~left))
                current = left
                if not left:
                    return found
            at = _end_in(run, hashes, at, get)
            run = get(hashes[at]) if at < end else None
        if at and current:
            found.append((Overlap(at), current))
        return found

    def _match_tiers(self, hashes: Sequence[int]) -> Match:
        """The same where some of those who hold the first block have it, or others, below the device."""
        get = self.runs.by_hash.get
        found: Match = []
        alike = {Overlap(): self.lanes.routed}
        """Lanes, by what they have of the prompt so far."""
        at, end = 0, len(hashes)
        while at < end and alike:
            run = get(hashes[at])
            if run is None:
                break
            run.used = True
            stop = _end_in(run, hashes, at, get)
            longer: dict[Overlap, int] = {}
            for overlap, lanes in alike.items():
                for tier in range(4):  # fastest first
                    here = lanes & run.holders >> tier
                    if here:
                        counts = list(overlap)
                        counts[tier] += stop - at
                        key = Overlap(*counts)
                        longer[key] = longer.get(key, 0) | here
                        lanes &= ~here
                        if not lanes:
                            break
                if lanes and at:
                    found.append((overlap, lanes))
            alike, at = longer, stop
        if at:
            found.extend(alike.items())
        return found

    def named(self, hashes: Sequence[int]) -> Iterator[tuple[Overlap, Sequence[str]]]:
        """(overlap, the workers that have it), fewest blocks first; workers that hold none are left out.

        One with several ranks may come several times: the last is the one that holds most.
        """
        names = self.lanes.names
        return ((overlap, names(lanes)) for overlap, lanes in self.match(hashes))

    def worker_overlaps(self, hashes: Sequence[int]) -> Overlaps:
        """The leading blocks each worker holds; of several ranks, the one that holds most."""
        distinct, of = [Overlap()], dict[str, int]()
        for number, (overlap, names) in enumerate(self.named(hashes), 1):
            distinct.append(overlap)
            for name in names:
                of[name] = number
        return Overlaps(distinct, of)

    def held(self, hashes: Sequence[int]) -> dict[str, Overlap]:
        """The same, by the worker's name. Workers that hold none are left out."""
        return {name: overlap for overlap, names in self.named(hashes) for name in names}

    def held_by_rank(self, hashes: Sequence[int]) -> dict[tuple[str, int], Overlap]:
        """The same for every (worker, data-parallel rank)."""
        return {
            (holder.name, holder.dp_rank): overlap
            for overlap, lanes in self.match(hashes)
            for holder in self.lanes.holders(lanes)
        }

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """`held`, as numbers of blocks in any tier."""
        return {name: overlap.blocks for overlap, names in self.named(hashes) for name in names}

    def blocks(self, holder: Holder, tier: Tier = Tier.DEVICE) -> list[int]:
        """All the index knows a holder to have in one tier. Goes over every run: for diagnosis and tests."""
        bit = holder.bit(tier)
        return [block for run in self.runs.all if run.holders & bit for block in run.hashes]

    # Keeping house

    def _swept(self, block: int) -> Run | None:
        """The block's run, without the bits that are being swept: only such a run may be split."""
        run = self.runs.by_hash.get(block)
        if self._sweeping and run is not None and run.holders & self._sweeping:
            self.runs.change(run, 0, len(run.hashes), run.holders & ~self._sweeping)
            run = self.runs.by_hash.get(block)
        return run

    def _end_of_new(self, hashes: Sequence[int], at: int) -> int:
        """Where the blocks end that are not known yet, nor here twice."""
        by_hash = self.runs.by_hash
        if by_hash.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
            return len(hashes)
        new: set[int] = set()
        for stop in range(at, len(hashes)):
            block = hashes[stop]
            if block in by_hash or block in new:
                return stop
            new.add(block)
        return len(hashes)

    def _make_room(self, count: int) -> None:
        by_hash, runs = self.runs.by_hash, self.runs.all
        if len(by_hash) + count > self._max_blocks:
            self.tidy(64 * count)  # what lost workers left goes first
        steps = HAND_STEPS
        while runs and len(by_hash) + count > self._max_blocks:
            self._hand %= len(runs)
            run = runs[self._hand]
            if run.used and steps:
                run.used = False
                self._hand += 1
                steps -= 1
                continue
            self._forget_run(self._last_of(run))
            steps = HAND_STEPS

    def _last_of(self, run: Run) -> Run:
        """The end of its chain, as far as one not used leads on."""
        for _ in range(HAND_STEPS):
            following = None if run.next is None else self.runs.by_hash.get(run.next)
            if following is None or following.used:
                break
            run = following
        return run

    def _forget_run(self, run: Run) -> None:
        checksum, count = reduce(xor, run.hashes), len(run.hashes)
        self.forgotten += count
        for holder in self.lanes.holders(run.holders):
            tiers = holder.tiers_in(run.holders).bit_count()
            self._forget(holder, tiers * count, checksum if tiers & 1 else 0)
        self.runs.drop(run)

    @staticmethod
    def _forget(holder: Holder, count: int, checksum: int) -> None:
        holder.forgotten += count
        holder.forgotten_xor ^= checksum


def _common(run: Run, start: int, hashes: Sequence[int], at: int) -> int:
    """How many blocks of `hashes` from `at` are those of the run from `start`."""
    count = min(len(run.hashes) - start, len(hashes) - at)
    mine, theirs = run.hashes[start : start + count], chain(hashes[at : at + count])
    if mine == theirs:
        return count
    return next(position for position in range(count) if mine[position] != theirs[position])


def _end_in(run: Run, hashes: Sequence[int], at: int, get: Callable[[int], Run | None]) -> int:
    """The first of `hashes` after `at`, where the run is met, that is not in it."""
    stop = min(at + len(run.hashes), len(hashes))
    if get(hashes[stop - 1]) is run:
        return stop
    high = stop - 1
    while high - at > 1:
        middle = (at + high) >> 1
        if get(hashes[middle]) is run:
            at = middle
        else:
            high = middle
    return high
