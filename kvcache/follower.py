"""Keeps one rank's part of an index true to that rank of a worker, from messages that may come late, twice or never.

    in step ──(number skipped, report ahead or other checksum, connection lost)──> gap ──(snapshot)──> in step
       ^──────────────────────────(new epoch, from number 1)──────────────────────────┘

While there is a gap the last picture stands and events are kept; the snapshot replaces the picture, and the kept events
that it does not contain follow. Pure: who fetches the snapshot, and when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvcache.events import Cleared, KvEventBatch, Tier
from kvcache.index import Holder, KvIndex
from kvcache.load import KvCheck

__all__ = ["Follower", "Gap", "Snapshot"]

MAX_KEPT_BLOCKS = 200_000
"""Blocks in events kept for a snapshot (about 10 MB). Past it they are dropped; the next snapshot mends that too."""


class Gap(StrEnum):
    """Why a snapshot is needed."""

    NEW = "new"
    """Nothing is known yet."""
    MISSED = "missed"
    """A number was skipped, or a message could not be read."""
    BEHIND = "behind"
    """A load report spoke of events that never came."""
    CHECKSUM = "checksum"
    """Same number, but not the same blocks."""
    DISCONNECTED = "disconnected"
    """The bus may have lost something."""
    DAMAGED = "damaged"
    """The index was found not to hold what it counts."""


class Follower:
    """One rank as its messages tell it. `gap` is None while the index has exactly what the rank had at `seq`."""

    def __init__(self, index: KvIndex, instance_id: str, epoch: int, dp_rank: int = 0) -> None:
        self.instance_id = instance_id
        self.dp_rank = dp_rank
        self.epoch = epoch
        self.seq = 0
        self.gap: Gap | None = Gap.NEW
        self._index = index
        self._holder = index.open(instance_id, dp_rank)
        self._kept: list[KvEventBatch] = []
        self._kept_blocks = 0
        self._awaited = 0
        """Number the last load report named; it must have come by the next report."""

    @property
    def holder(self) -> Holder:
        """Its present part of the index."""
        return self._holder

    def on_batch(self, batch: KvEventBatch) -> None:
        """Applies what is new, in order; a skipped number opens a gap."""
        if batch.epoch < self.epoch:
            return  # of a former life
        if batch.epoch > self.epoch:
            self._begin(batch.epoch)
        if self.gap is None and batch.first_seq > self.seq + 1:
            self.gap = Gap.MISSED
        if self.gap is not None:
            self._keep(batch)
            return
        for event in batch.events[self.seq + 1 - batch.first_seq :]:
            self._index.apply(self._holder, event)
        self.seq = max(self.seq, batch.last_seq)

    def on_check(self, epoch: int, check: KvCheck) -> None:
        """Checks the picture; it may speak of events that are still on their way, which have until the next check."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self._begin(epoch)
        if self.gap is not None:
            return
        if self._awaited > self.seq:
            self.gap = Gap.BEHIND
        elif check.last_seq == self.seq and (check.held_xor, check.held_blocks) != (
            self._holder.xor,
            self._holder.count,
        ):
            self.gap = Gap.CHECKSUM
        self._awaited = check.last_seq

    def lose(self, gap: Gap) -> None:
        """Something may have been missed: a snapshot is needed."""
        self.gap = self.gap or gap

    def restart(self, epoch: int) -> None:
        """Somebody else says the worker has begun a new life; what it has said since may have been missed."""
        if epoch > self.epoch:
            self._begin(epoch)
            self.gap = Gap.NEW

    def snapshot(self) -> Snapshot:
        """Begins to take in a snapshot that was asked for after the gap was known."""
        return Snapshot(self, self._index)

    def close(self) -> None:
        """Forgets the worker."""
        self._index.close(self._holder)
        self._kept.clear()

    def adopt(self, holder: Holder, epoch: int, seq: int) -> None:
        """A snapshot's picture replaces the present one, unless that is already as new. For `Snapshot` only."""
        if epoch < self.epoch or (epoch == self.epoch and self.gap is None):
            self._index.close(holder)
            return
        self._index.close(self._holder)
        self._index.route(holder)
        self._holder = holder
        self.epoch, self.seq, self.gap, self._awaited = epoch, seq, None, 0
        kept, self._kept, self._kept_blocks = self._kept, [], 0
        for batch in kept:
            self.on_batch(batch)

    def _begin(self, epoch: int) -> None:
        """A new life: nothing is held, and its first event has number 1."""
        self._index.clear(self._holder)
        self.epoch, self.seq, self.gap, self._awaited = epoch, 0, None, 0
        self._kept.clear()
        self._kept_blocks = 0

    def _keep(self, batch: KvEventBatch) -> None:
        self._kept_blocks += sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in batch.events)
        if self._kept_blocks > MAX_KEPT_BLOCKS:
            self._kept.clear()
            self._kept_blocks = 0
        else:
            self._kept.append(batch)


class Snapshot:
    """A rank's picture as it arrives in parts; invisible to matches until `finish`."""

    def __init__(self, follower: Follower, index: KvIndex) -> None:
        self._follower = follower
        self._index = index
        self._holder = index.open(follower.instance_id, follower.dp_rank, routed=False)

    def add(self, tier: Tier, hashes: Sequence[int], parents: Sequence[int | None]) -> None:
        """One part: `parents[i]` is the block before `hashes[i]`, None where that begins a prompt."""
        start = 0
        for at in range(1, len(hashes) + 1):
            if at == len(hashes) or parents[at] != hashes[at - 1]:  # the end of a run
                self._index.store(self._holder, parents[start], hashes[start:at], tier)
                start = at

    def finish(self, epoch: int, seq: int) -> bool:
        """The picture is whole, as after event `seq`. False: there is a gap again, ask for another."""
        self._follower.adopt(self._holder, epoch, seq)
        return self._follower.gap is None

    def abandon(self) -> None:
        """It will not be finished."""
        self._index.close(self._holder)
