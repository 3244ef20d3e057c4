from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import follower as follower_module
from kvcache.events import Cleared, KvEvent, KvEventBatch, Removed, Stored, Tier
from kvcache.follower import Follower, Gap
from kvcache.holdings import Holdings
from kvcache.index import KvIndex
from kvcache.integrity import check_integrity
from kvcache.load import KvCheck


class Worker:
    """The other end: an engine's holdings, its numbered events, and its snapshot."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.seq = 0
        self.holdings = Holdings()

    def say(self, *events: KvEvent) -> KvEventBatch:
        news = self.holdings.apply(events)
        batch = KvEventBatch("w", self.epoch, self.seq + 1, tuple(news))
        self.seq += len(news)
        return batch

    def report(self) -> tuple[int, KvCheck]:
        return self.epoch, KvCheck(0, self.seq, self.holdings.xor, self.holdings.count)

    def restart(self) -> None:
        self.__init__(self.epoch + 1)  # type: ignore[misc]


def mend(follower: Follower, worker: Worker, meanwhile: Iterable[KvEventBatch] = ()) -> bool:
    snapshot = follower.snapshot()
    epoch, seq = worker.epoch, worker.seq
    for tier in Tier:
        snapshot.add(tier, worker.holdings.hashes(tier), worker.holdings.parents(tier))
    for batch in meanwhile:
        follower.on_batch(batch)
    return snapshot.finish(epoch, seq)


@pytest.fixture
def index() -> KvIndex:
    return KvIndex()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def follower(index: KvIndex, worker: Worker) -> Follower:
    follower = Follower(index, "w", epoch=1)
    assert follower.gap is Gap.NEW
    assert mend(follower, worker)
    return follower


def assert_true(follower: Follower, index: KvIndex, worker: Worker) -> None:
    assert follower.gap is None
    assert (follower.epoch, follower.seq) == (worker.epoch, worker.seq)
    for tier in Tier:
        assert set(index.blocks(follower.holder, tier)) == set(worker.holdings.hashes(tier))
    check_integrity(index)


def test_events_in_order_are_applied(follower: Follower, index: KvIndex, worker: Worker) -> None:
    follower.on_batch(worker.say(Stored(None, (1, 2, 3))))
    follower.on_batch(worker.say(Removed((3,)), Stored(2, (4,))))
    assert_true(follower, index, worker)
    assert index.overlaps([1, 2, 4]) == {"w": 3}


def test_repeated_and_overlapping_batches_change_nothing(follower: Follower, index: KvIndex, worker: Worker) -> None:
    first, second = worker.say(Stored(None, (1,))), worker.say(Removed((1,)))
    both = KvEventBatch("w", 1, 1, first.events + second.events)
    for batch in (first, first, both, second, first):
        follower.on_batch(batch)
    assert_true(follower, index, worker)


def test_a_skipped_number_opens_a_gap_and_the_snapshot_closes_it(
    follower: Follower, index: KvIndex, worker: Worker
) -> None:
    worker.say(Stored(None, (1,)))  # lost
    follower.on_batch(worker.say(Stored(1, (2,))))
    assert follower.gap is Gap.MISSED
    assert mend(follower, worker)
    assert_true(follower, index, worker)


def test_events_during_a_snapshot_follow_it_and_those_it_contains_are_dropped(
    follower: Follower, index: KvIndex, worker: Worker
) -> None:
    worker.say(Stored(None, (1,)))  # lost
    contained = worker.say(Stored(1, (2,)))
    follower.on_batch(contained)
    snapshot = follower.snapshot()
    snapshot.add(Tier.DEVICE, worker.holdings.hashes(), worker.holdings.parents())
    seq = worker.seq
    follower.on_batch(worker.say(Removed((2,))))
    follower.on_batch(contained)
    assert snapshot.finish(1, seq)
    assert_true(follower, index, worker)


def test_the_old_picture_stands_until_the_snapshot_is_whole(follower: Follower, index: KvIndex, worker: Worker) -> None:
    follower.on_batch(worker.say(Stored(None, (1,))))
    follower.lose(Gap.DISCONNECTED)
    snapshot = follower.snapshot()
    snapshot.add(Tier.DEVICE, [5], [None])
    assert index.overlaps([1]) == {"w": 1}
    assert index.overlaps([5]) == {}
    snapshot.abandon()
    assert follower.gap is Gap.DISCONNECTED


def test_a_lost_last_message_is_noticed_by_the_second_report(
    follower: Follower, index: KvIndex, worker: Worker
) -> None:
    worker.say(Stored(None, (1,)))  # lost
    follower.on_check(*worker.report())
    assert follower.gap is None  # it may still be on its way
    follower.on_check(*worker.report())
    assert follower.gap is Gap.BEHIND
    assert mend(follower, worker)
    assert_true(follower, index, worker)


def test_a_report_that_overtakes_its_events_is_no_gap(follower: Follower, index: KvIndex, worker: Worker) -> None:
    batch = worker.say(Stored(None, (1,)))
    report = worker.report()
    follower.on_check(*report)
    follower.on_batch(batch)
    follower.on_check(*worker.report())
    assert_true(follower, index, worker)


def test_the_same_number_with_other_blocks_is_a_gap(follower: Follower, index: KvIndex, worker: Worker) -> None:
    batch = worker.say(Stored(None, (1,)))
    follower.on_batch(KvEventBatch("w", 1, batch.first_seq, (Stored(None, (9,)),)))
    follower.on_check(*worker.report())
    assert follower.gap is Gap.CHECKSUM
    assert mend(follower, worker)
    assert_true(follower, index, worker)


def test_a_new_epoch_forgets_the_old_one_and_old_messages_are_void(
    follower: Follower, index: KvIndex, worker: Worker
) -> None:
    old = worker.say(Stored(None, (1,)))
    report = worker.report()
    follower.on_batch(old)
    worker.restart()
    follower.on_batch(worker.say(Stored(None, (2,))))
    follower.on_batch(old)
    follower.on_check(*report)
    assert_true(follower, index, worker)


def test_a_new_epoch_is_learnt_from_a_report_too(follower: Follower, index: KvIndex, worker: Worker) -> None:
    follower.on_batch(worker.say(Stored(None, (1,))))
    worker.restart()
    follower.on_check(*worker.report())
    assert_true(follower, index, worker)


def test_a_new_epoch_told_by_others_needs_a_snapshot(follower: Follower, index: KvIndex, worker: Worker) -> None:
    follower.on_batch(worker.say(Stored(None, (1,))))
    follower.restart(worker.epoch)
    assert follower.gap is None  # nothing new
    worker.restart()
    worker.say(Stored(None, (2,)))  # lost
    follower.restart(worker.epoch)
    assert follower.gap is Gap.NEW
    assert not index.overlaps([1])
    assert mend(follower, worker)
    assert_true(follower, index, worker)


def test_a_snapshot_of_a_former_life_is_thrown_away(follower: Follower, index: KvIndex, worker: Worker) -> None:
    follower.lose(Gap.DISCONNECTED)
    snapshot = follower.snapshot()
    snapshot.add(Tier.DEVICE, [7], [None])
    worker.restart()
    follower.on_batch(worker.say(Stored(None, (2,))))
    assert snapshot.finish(1, 5)
    assert_true(follower, index, worker)


def test_kept_events_are_bounded_and_their_loss_is_a_gap_again(
    follower: Follower, index: KvIndex, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "MAX_KEPT_BLOCKS", 4)
    follower.lose(Gap.DISCONNECTED)
    meanwhile = [worker.say(Stored(None, (block,))) for block in range(1, 7)]
    behind = Worker()
    assert not mend(follower, behind, meanwhile)
    assert follower.gap is Gap.MISSED
    assert mend(follower, worker)
    assert_true(follower, index, worker)


HASHES: Sequence[int] = range(1, 13)
TIERS = st.just(Tier.DEVICE) | st.sampled_from(Tier)
EVENTS = st.one_of(
    st.builds(
        lambda at, tier: Stored(HASHES[at - 1] if at else None, tuple(HASHES[at : at + 3]), tier),
        st.integers(0, 11),
        TIERS,
    ),
    st.builds(Removed, st.lists(st.sampled_from(HASHES), min_size=1, max_size=3).map(tuple), TIERS),
    st.just(Cleared()),
)


@settings(deadline=None)
@given(
    st.lists(st.lists(EVENTS, min_size=1, max_size=4), max_size=15),
    st.randoms(use_true_random=False),
    st.integers(1, 30),
)
def test_whatever_the_bus_does_two_reports_and_a_snapshot_make_the_picture_true(
    said: list[list[KvEvent]], chance: random.Random, max_blocks: int
) -> None:
    worker, index = Worker(), KvIndex(max_blocks)
    follower = Follower(index, "w", epoch=1)
    mend(follower, worker)
    on_the_way: list[KvEventBatch] = []
    for events in said:
        batch = worker.say(*events)
        if batch.events:
            on_the_way.append(batch)
        if chance.random() < 0.1:
            worker.restart()
        while on_the_way and chance.random() < 0.7:
            batch = on_the_way[chance.randrange(len(on_the_way))]  # reordered
            if chance.random() < 0.8:  # else it comes again
                on_the_way.remove(batch)
            if chance.random() < 0.8:  # else it is lost
                follower.on_batch(batch)
        if chance.random() < 0.3:
            follower.on_check(*worker.report())
        if follower.gap and chance.random() < 0.3:
            mend(follower, worker)
    follower.on_check(*worker.report())
    follower.on_check(*worker.report())
    if follower.gap:
        assert mend(follower, worker)
    if max_blocks >= len(HASHES):
        assert_true(follower, index, worker)
    for tier in Tier:
        assert set(index.blocks(follower.holder, tier)) <= set(worker.holdings.hashes(tier))
    follower.on_check(*worker.report())
    assert follower.gap is None  # a full index is no reason to ask again
    assert len(index) <= max_blocks
    check_integrity(index)
