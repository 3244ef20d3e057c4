"""A worker's voice: numbers its KV events, publishes them with its load, and serves the snapshot that mends a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Protocol

import grpc

from controlplane import kv_wire
from kvcache.events import KvEvent, KvEventBatch, Removed, Stored, Tier
from kvcache.holdings import Holdings
from kvcache.load import KvCheck, LoadReport
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc

__all__ = ["KvPublisher", "KvSourceServicer", "Load", "Publisher"]

FLUSH_AFTER_S = 0.005
"""Events wait this long for company: one batch of many costs far less than many of one."""
MAX_BATCH_HASHES = 32_768
"""About 300 KiB, safely below a NATS server's default payload limit of 1 MiB."""
SNAPSHOT_PART_BLOCKS = 8_192
"""A receiver takes a part in a few milliseconds, between its other work."""


class Publisher(Protocol):
    """What is needed of `controlplane.bus.Bus`."""

    def publish(self, subject: str, data: bytes) -> None:
        """Fire and forget; may drop."""


class Load(Protocol):
    """How busy the engine is; `engines.base.LoadSnapshot` is one."""

    @property
    def running_requests(self) -> int:
        """Admitted and not finished."""

    @property
    def waiting_requests(self) -> int:
        """Accepted and not admitted."""

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""

    @property
    def kv_used_blocks(self) -> int:
        """Blocks that running requests or readers need."""

    @property
    def kv_total_blocks(self) -> int:
        """All blocks."""

    @property
    def kv_leased_blocks(self) -> int:
        """Blocks held for readers."""

    @property
    def step_time_s(self) -> float:
        """Mean of recent steps; 0: none yet."""

    @property
    def steps(self) -> int:
        """Steps since start."""


class KvPublisher:
    """Publishes one worker's KV events and load. All methods belong to the event loop's thread.

    What it numbers is the change of the *set* of held blocks (see `Holdings`), so receivers may apply an event twice.
    Nothing is awaited and nothing kept for later: what the bus loses, a receiver sees by the numbers or by the next
    load report, and mends with a snapshot.
    """

    def __init__(self, bus: Publisher, deployment: str, instance_id: str, epoch: int) -> None:
        self._bus = bus
        self._kv_subject = kv_wire.kv_subject(deployment, instance_id)
        self._load_subject = kv_wire.load_subject(deployment, instance_id)
        self._instance_id = instance_id
        self._epoch = epoch
        self._ranks = {0: _Rank(0)}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def instance_id(self) -> str:
        """The worker this is."""
        return self._instance_id

    @property
    def epoch(self) -> int:
        """The epoch its events belong to."""
        return self._epoch

    @property
    def seq(self) -> int:
        """Number of rank 0's last event, published or pending; 0: none yet in this epoch."""
        return self._ranks[0].seq

    @property
    def holdings(self) -> Holdings:
        """What rank 0 holds now; read only."""
        return self._ranks[0].holdings

    def events(self, events: Sequence[KvEvent], dp_rank: int = 0) -> None:
        """Takes the events of one rank's engine, in order; they are out within `FLUSH_AFTER_S`."""
        rank = self._ranks.get(dp_rank)
        if rank is None:
            rank = self._ranks[dp_rank] = _Rank(dp_rank)
        for event in rank.holdings.apply(events):
            for part in _split(event):
                size = len(part.hashes) if isinstance(part, Stored | Removed) else 0
                if rank.pending_hashes + size > MAX_BATCH_HASHES:
                    self._publish(rank)
                rank.pending.append(part)
                rank.pending_hashes += size
        if rank.pending and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self.flush)

    def flush(self) -> None:
        """Publishes what is pending, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for rank in self._ranks.values():
            if rank.pending:
                self._publish(rank)

    def load_report(self, load: Load) -> None:
        """Publishes the load, with the number of the last event and a check on what is held."""
        self.flush()  # so that the check describes events that are already on their way
        own, *others = (rank.check() for rank in self._ranks.values())
        report = LoadReport(
            instance_id=self._instance_id,
            epoch=self._epoch,
            last_seq=own.last_seq,
            held_xor=own.held_xor,
            held_blocks=own.held_blocks,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            kv_used_blocks=load.kv_used_blocks,
            kv_total_blocks=load.kv_total_blocks,
            kv_leased_blocks=load.kv_leased_blocks,
            step_time_us=round(load.step_time_s * 1e6),
            steps=load.steps,
            other_ranks=tuple(others),
        )
        self._bus.publish(self._load_subject, kv_wire.load_to_bytes(report))

    def snapshot(self, dp_rank: int = 0) -> tuple[int, int, dict[Tier, list[int]]]:
        """(epoch, number of the last event in it, hashes by tier) of one rank."""
        rank = self._ranks[dp_rank]
        return self._epoch, rank.seq, {tier: rank.holdings.hashes(tier) for tier in Tier}

    def snapshot_parts(self) -> Iterator[kv_pb2.KvSnapshotPart]:
        """The same of every rank, in messages; none of them may be published in between."""
        for rank in self._ranks.values():
            for tier in Tier:
                hashes = rank.holdings.hashes(tier)
                parents = iter(rank.holdings.parents(tier))
                # The device tier is always there, so that an empty rank states its number too.
                for start in range(0, len(hashes) or tier is Tier.DEVICE, SNAPSHOT_PART_BLOCKS):
                    yield kv_pb2.KvSnapshotPart(
                        instance_id=self._instance_id,
                        epoch=self._epoch,
                        seq=rank.seq,
                        tier=kv_wire.tier_to_proto(tier),
                        hashes=hashes[start : start + SNAPSHOT_PART_BLOCKS],
                        parents=[parent or 0 for parent in islice(parents, SNAPSHOT_PART_BLOCKS)],
                        dp_rank=rank.dp_rank,
                    )

    def close(self) -> None:
        """Publishes what is pending and starts no more timers by itself."""
        self.flush()

    def _publish(self, rank: _Rank) -> None:
        batch = KvEventBatch(self._instance_id, self._epoch, rank.published + 1, tuple(rank.pending), rank.dp_rank)
        rank.published = batch.last_seq
        rank.pending.clear()
        rank.pending_hashes = 0
        self._bus.publish(self._kv_subject, kv_wire.batch_to_bytes(batch))


class _Rank:
    """What one data-parallel rank holds, and its events that are not out yet."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.holdings = Holdings()
        self.pending: list[KvEvent] = []
        self.pending_hashes = 0
        self.published = 0
        """Number of the last event given to the bus; the pending ones follow it."""

    @property
    def seq(self) -> int:
        """Number of the last event."""
        return self.published + len(self.pending)

    def check(self) -> KvCheck:
        """What receivers should have, once all is published."""
        return KvCheck(self.dp_rank, self.published, self.holdings.xor, self.holdings.count)


class KvSourceServicer(kv_pb2_grpc.KvSourceServicer):
    """Serves `GetKvSnapshot` from a publisher's own picture."""

    def __init__(self, publisher: KvPublisher) -> None:
        self._publisher = publisher

    async def GetKvSnapshot(  # noqa: N802
        self,
        request: kv_pb2.GetKvSnapshotRequest,
        context: grpc.aio.ServicerContext[kv_pb2.GetKvSnapshotRequest, AsyncIterator[kv_pb2.KvSnapshotPart]],
    ) -> AsyncIterator[kv_pb2.KvSnapshotPart]:
        """The picture as of the call; events that happen while it streams have higher numbers."""
        for part in list(self._publisher.snapshot_parts()):
            yield part


def _split(event: KvEvent) -> Iterator[KvEvent]:
    """The same said in events of at most `MAX_BATCH_HASHES`."""
    if not isinstance(event, Stored | Removed) or len(event.hashes) <= MAX_BATCH_HASHES:
        yield event
        return
    parent = event.parent if isinstance(event, Stored) else None
    for start in range(0, len(event.hashes), MAX_BATCH_HASHES):
        hashes = event.hashes[start : start + MAX_BATCH_HASHES]
        yield Stored(parent, hashes, event.tier) if isinstance(event, Stored) else Removed(hashes, event.tier)
        parent = hashes[-1]
