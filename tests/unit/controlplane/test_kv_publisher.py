from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import kv_wire
from controlplane.kv_publisher import MAX_BATCH_HASHES, KvPublisher, KvSourceServicer
from engines.base import LoadSnapshot
from kvcache.events import Cleared, KvEventBatch, Removed, Stored, Tier
from kvcache.load import KvCheck, LoadReport
from tokenmill.kv.v1 import kv_pb2

U64 = st.integers(0, 2**64 - 1)
HASHES = st.lists(U64, min_size=1, max_size=9).map(tuple)
EVENT = st.one_of(
    st.builds(Stored, st.none() | U64, HASHES, st.sampled_from(Tier)),
    st.builds(Removed, HASHES, st.sampled_from(Tier)),
    st.just(Cleared()),
)


@dataclass
class Outbox:
    """Where a publisher's messages land; NATS itself is in the integration tests."""

    batches: list[KvEventBatch] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, subject: str, data: bytes) -> None:
        if subject == kv_wire.kv_subject("test", "w"):
            self.batches.append(kv_wire.batch_from_bytes(data))
        else:
            assert subject == kv_wire.load_subject("test", "w")
            self.loads.append(kv_wire.load_from_bytes(data))
        self.came.set()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def publisher(outbox: Outbox) -> KvPublisher:
    return KvPublisher(outbox, "test", "w", epoch=5)


@given(st.builds(KvEventBatch, st.text(), U64, U64, st.lists(EVENT, max_size=5).map(tuple), st.integers(0, 7)))
def test_a_batch_survives_the_wire(batch: KvEventBatch) -> None:
    assert kv_wire.batch_from_bytes(kv_wire.batch_to_bytes(batch)) == batch


CHECK = st.builds(KvCheck, st.integers(1, 7), U64, U64, U64)
REPORT = st.builds(
    LoadReport,
    *(st.text(), U64, U64, U64, U64),
    running_requests=st.integers(0, 2**32 - 1),
    other_ranks=st.lists(CHECK, max_size=2).map(tuple),
)


@given(REPORT)
def test_a_load_report_survives_the_wire(report: LoadReport) -> None:
    assert kv_wire.load_from_bytes(kv_wire.load_to_bytes(report)) == report


def test_events_this_version_does_not_know_are_refused_not_skipped() -> None:
    empty = kv_pb2.KvEventBatch(events=[kv_pb2.KvEvent()]).SerializeToString()
    tierless = kv_pb2.KvEventBatch(events=[kv_pb2.KvEvent(stored=kv_pb2.Stored(hashes=[1]))]).SerializeToString()
    with pytest.raises(ValueError, match="unknown kind"):
        kv_wire.batch_from_bytes(empty)
    with pytest.raises(ValueError, match="unknown tier 0"):
        kv_wire.batch_from_bytes(tierless)


async def test_events_of_one_moment_share_a_batch_and_are_numbered_on(outbox: Outbox, publisher: KvPublisher) -> None:
    publisher.events([Stored(None, (1, 2))])
    publisher.events([Stored(2, (3,)), Removed((3,))])
    async with asyncio.timeout(1):
        await outbox.came.wait()
    publisher.events([Cleared()])
    publisher.flush()
    assert [(b.epoch, b.first_seq, b.events) for b in outbox.batches] == [
        (5, 1, (Stored(None, (1, 2)), Stored(2, (3,)), Removed((3,)))),
        (5, 4, (Cleared(),)),
    ]
    assert publisher.seq == 4


async def test_a_load_report_follows_the_events_it_speaks_of(outbox: Outbox, publisher: KvPublisher) -> None:
    publisher.events([Stored(None, (6, 5))])
    publisher.load_report(LoadSnapshot(running_requests=2, step_time_s=0.0015))
    assert outbox.batches[0].last_seq == outbox.loads[0].last_seq == 1
    report = outbox.loads[0]
    assert (report.held_xor, report.held_blocks, report.running_requests, report.step_time_us) == (3, 2, 2, 1500)


async def test_huge_events_are_cut_to_fit_a_message(outbox: Outbox, publisher: KvPublisher) -> None:
    blocks = tuple(range(1, 2 * MAX_BATCH_HASHES + 2))
    publisher.events([Stored(None, blocks), Removed(blocks)])
    publisher.flush()
    stored = [e for b in outbox.batches for e in b.events if isinstance(e, Stored)]
    assert tuple(h for e in stored for h in e.hashes) == blocks
    assert [e.parent for e in stored] == [None, MAX_BATCH_HASHES, 2 * MAX_BATCH_HASHES]
    assert (
        max(len(e.hashes) for b in outbox.batches for e in b.events if not isinstance(e, Cleared)) <= MAX_BATCH_HASHES
    )


async def test_a_snapshot_states_its_number_parents_and_tiers_and_does_so_when_empty(publisher: KvPublisher) -> None:
    async def parts() -> list[kv_pb2.KvSnapshotPart]:
        context: Any = None  # not used by the servicer
        return [
            part async for part in KvSourceServicer(publisher).GetKvSnapshot(kv_pb2.GetKvSnapshotRequest(), context)
        ]

    (empty,) = await parts()
    assert (empty.instance_id, empty.epoch, empty.seq, list(empty.hashes)) == ("w", 5, 0, [])
    publisher.events([Stored(None, (1, 2)), Stored(2, (3,), Tier.HOST)])
    device, host = await parts()
    assert (device.seq, list(device.hashes), list(device.parents)) == (2, [1, 2], [0, 1])
    assert (host.seq, host.tier, list(host.hashes), list(host.parents)) == (2, kv_pb2.TIER_HOST, [3], [2])
    publisher.close()


async def test_each_rank_numbers_its_own_events_and_is_checked_and_shown_by_itself(
    outbox: Outbox, publisher: KvPublisher
) -> None:
    publisher.events([Stored(None, (1,))])
    publisher.events([Stored(None, (1, 2))], dp_rank=1)
    publisher.load_report(LoadSnapshot())
    assert [(b.dp_rank, b.first_seq, b.events) for b in outbox.batches] == [
        (0, 1, (Stored(None, (1,)),)),
        (1, 1, (Stored(None, (1, 2)),)),
    ]
    assert outbox.loads[0].checks == (KvCheck(0, 1, 1, 1), KvCheck(1, 1, 3, 2))
    assert [(p.dp_rank, p.seq, list(p.hashes)) for p in publisher.snapshot_parts()] == [(0, 1, [1]), (1, 1, [1, 2])]
