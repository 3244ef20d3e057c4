"""Blocks kept in runs: consecutive blocks with the same holders are one record. Pure.

A hash names its whole prefix, so equal hashes stand in equal chains, and a prompt that meets a run in two blocks holds
all between them in the same order. A run splits where its blocks get different holders, and joins the next one when
they are the same again. Nothing points at a parent or a child but a hint that joining uses.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["LONGEST", "Run", "Runs", "chain"]

LONGEST = 512
"""Blocks in a run, which bounds the cost of each change. A longer prompt is several runs."""


class Run(msgspec.Struct, gc=False, eq=False):  # refers to no other record, so the collector may skip it
    """Blocks that follow one another and have the same holders."""

    hashes: array[int]
    holders: int
    """Never 0; see `KvIndex` for its bits."""
    slot: int
    """Its place in `Runs.all`."""
    next: int | None = None
    """A block known to follow the last one, if any is; it may be gone, or one of several."""
    used: bool = True
    """Matched or made since the clock's hand was here last."""


def chain(hashes: Iterable[int]) -> array[int]:
    """Hashes as a run keeps them: eight bytes each."""
    return array("Q", hashes)


class Runs:
    """All runs. `by_hash` and `all` are for reading."""

    def __init__(self) -> None:
        self.by_hash: dict[int, Run] = {}
        self.all: list[Run] = []
        """In no order, so that a cursor can go over them a few at a time."""

    def add(self, after: int | None, hashes: Sequence[int], holders: int) -> None:
        """New blocks, none of them known or twice here, that follow `after`."""
        by_hash = self.by_hash
        before = None if after is None else self._ending_with(after)
        if before is not None and before.holders == holders and len(before.hashes) + len(hashes) <= LONGEST:
            before.hashes.extend(hashes)
            before.next, before.used = None, True
            for block in hashes:
                by_hash[block] = before
            return
        if before is not None:
            before.next = hashes[0]
        for start in range(0, len(hashes), LONGEST):
            part = hashes[start : start + LONGEST]
            run = self._new(chain(part), holders)
            if start + LONGEST < len(hashes):
                run.next = hashes[start + LONGEST]
            for block in part:
                by_hash[block] = run

    def change(self, run: Run, start: int, stop: int, holders: int, after: int | None = None) -> None:
        """Gives `run.hashes[start:stop]` other holders; 0: drops those blocks. `after`: the block before, if known."""
        if not holders:
            self._drop(run, start, stop)
            return
        if start:
            run, after = self._split(run, start), None
        count = stop - start
        before = None if after is None else self._ending_with(after)
        if before is not None and before.holders == holders and len(before.hashes) + count <= LONGEST:
            self._move_front(run, count, before)
            return
        if count < len(run.hashes):
            first = run.hashes[0]
            self._split(run, count)
            run = self.by_hash[first]
        run.holders = holders
        self.join(run)

    def join(self, run: Run) -> None:
        """Makes one of this run and the next, if they may be one."""
        following = None if run.next is None else self.by_hash.get(run.next)
        if (
            following is None
            or following is run
            or following.holders != run.holders
            or following.hashes[0] != run.next
            or len(run.hashes) + len(following.hashes) > LONGEST
        ):
            return
        if len(following.hashes) <= len(run.hashes):
            self._adopt(following.hashes, run)
            run.hashes.extend(following.hashes)
            run.next = following.next
            self._unlist(following)
        else:
            self._adopt(run.hashes, following)
            following.hashes[0:0] = run.hashes
            following.used |= run.used
            self._unlist(run)

    def drop(self, run: Run) -> None:
        """Forgets a whole run."""
        self._drop(run, 0, len(run.hashes))

    def drop_last(self, run: Run, block: int) -> None:
        """Forgets its last block, which is this one: how engines evict, and so worth a short way."""
        del self.by_hash[block]
        run.hashes.pop()
        run.next = block
        if not run.hashes:
            self._unlist(run)

    def discard(self, run: Run) -> None:
        """Forgets a run of which nothing is certain."""
        for block in run.hashes:
            if self.by_hash.get(block) is run:
                del self.by_hash[block]
        self.all[:] = [one for one in self.all if one is not run]
        for slot, one in enumerate(self.all):
            one.slot = slot

    def _drop(self, run: Run, start: int, stop: int) -> None:
        if start and stop < len(run.hashes):  # a hole
            first = run.hashes[0]
            self._split(run, stop)
            run = self.by_hash[first]
        for block in run.hashes[start:stop]:
            del self.by_hash[block]
        if stop == len(run.hashes):
            run.next = run.hashes[start]
        del run.hashes[start:stop]
        if not run.hashes:
            self._unlist(run)

    def _split(self, run: Run, at: int) -> Run:
        """Two runs of one, both with blocks; returns the second. The shorter becomes a new record."""
        hashes = run.hashes
        second = hashes[at]
        if 2 * at > len(hashes):
            tail = self._new(hashes[at:], run.holders)
            tail.next, tail.used = run.next, run.used
            self._adopt(tail.hashes, tail)
            del hashes[at:]
            run.next = second
            return tail
        head = self._new(hashes[:at], run.holders)
        head.next, head.used = second, run.used
        self._adopt(head.hashes, head)
        del hashes[:at]
        return run

    def _move_front(self, run: Run, count: int, before: Run) -> None:
        """The first blocks of a run become the last ones of the run before."""
        moved = run.hashes[:count]
        self._adopt(moved, before)
        before.hashes.extend(moved)
        before.used |= run.used
        if count < len(run.hashes):
            del run.hashes[:count]
            before.next = run.hashes[0]
        else:
            before.next = run.next
            self._unlist(run)
            self.join(before)

    def _adopt(self, hashes: Iterable[int], run: Run) -> None:
        by_hash = self.by_hash
        for block in hashes:
            by_hash[block] = run

    def _ending_with(self, block: int) -> Run | None:
        run = self.by_hash.get(block)
        return run if run is not None and run.hashes[-1] == block else None

    def _new(self, hashes: array[int], holders: int) -> Run:
        run = Run(hashes, holders, len(self.all))
        self.all.append(run)
        return run

    def _unlist(self, run: Run) -> None:
        last = self.all.pop()
        if last is not run:
            self.all[run.slot] = last
            last.slot = run.slot
