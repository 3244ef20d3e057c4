"""Looks for damage in an index, a few blocks at a time, so that an idle router can. Pure.

Each run is checked by itself. What each holder is said to hold is summed up over a pass and compared with its running
checksum; a change of the index meanwhile makes the sums void, which is why that needs an idle time.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

from kvcache.index import Holder, KvIndex
from kvcache.runs import LONGEST, Run

__all__ = ["Inspection", "check_integrity"]


class Inspection:
    """One pass after the other over an index."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._left = 0
        """Runs not looked at in this pass: from the end, as one that goes is replaced by the last."""
        self._changes = index.changes
        self._whole = False
        """No change since this pass began."""
        self._sums: dict[Holder, tuple[int, int]] = {}
        self._restart()

    def step(self, blocks: int) -> dict[Holder, str]:
        """Looks at about so many blocks; the damaged holders, with what is wrong.

        A damaged run is dropped from the index; all a damaged holder has must be told anew, under a new holder.
        """
        index, damaged = self._index, dict[Holder, str]()
        if self._changes != index.changes:
            self._sums.clear()
            self._whole = False
            self._changes = index.changes
        while blocks > 0 and self._left:
            self._left = min(self._left, len(index.runs.all)) - 1
            if self._left < 0:
                self._left = 0
                break
            run = index.runs.all[self._left]
            blocks -= len(run.hashes)
            wrong = self._wrong(run, self._left)
            holders = list(index.lanes.holders(run.holders))
            if wrong:
                damaged.update(dict.fromkeys(holders, wrong))
                index.discard(run)
                self._whole = False
            elif self._whole:
                self._sum(run, holders)
        if not self._left:
            if self._whole and not damaged:
                damaged = self._compare()
            self._restart()
        return damaged

    def _restart(self) -> None:
        self._left = len(self._index.runs.all)
        self._changes = self._index.changes
        self._whole = True
        self._sums.clear()

    def _wrong(self, run: Run, slot: int) -> str | None:
        if not run.holders:
            return "a run without holders"
        if not 0 < len(run.hashes) <= LONGEST or run.slot != slot:
            return f"a run of {len(run.hashes)} blocks at {slot} that says {run.slot}"
        get = self._index.runs.by_hash.get
        if any(get(block) is not run for block in run.hashes):
            return "a block that leads to another run"
        return None

    def _sum(self, run: Run, holders: list[Holder]) -> None:
        checksum, count = reduce(xor, run.hashes), len(run.hashes)
        for holder in holders:
            tiers = holder.tiers_in(run.holders).bit_count()
            so_far, counted = self._sums.get(holder, (0, 0))
            self._sums[holder] = so_far ^ (checksum if tiers & 1 else 0), counted + tiers * count

    def _compare(self) -> dict[Holder, str]:
        damaged = {}
        for holder in self._index.lanes.all():
            checksum, count = self._sums.get(holder, (0, 0))
            counted = holder.count - holder.forgotten
            if count != counted:
                damaged[holder] = f"{holder.name} counts {counted} blocks and holds {count}"
            elif checksum != holder.xor ^ holder.forgotten_xor:
                damaged[holder] = f"{holder.name}'s XOR is not that of its blocks"
        return damaged


def check_integrity(index: KvIndex) -> None:
    """The whole of it at once. Raises `AssertionError` when something is wrong."""
    blocks = sum(len(run.hashes) for run in index.runs.all)
    if blocks != len(index):
        raise AssertionError(f"{blocks} blocks in runs and {len(index)} known")
    damaged = Inspection(index).step(blocks + 1)
    if damaged:
        raise AssertionError(next(iter(damaged.values())))
