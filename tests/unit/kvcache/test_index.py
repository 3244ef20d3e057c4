from __future__ import annotations

import os
import random
from collections import defaultdict
from functools import reduce
from operator import xor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.events import Cleared, Removed, Stored, Tier
from kvcache.index import Holder, KvIndex, Overlap
from kvcache.integrity import Inspection, check_integrity
from kvcache.runs import LONGEST

LENGTH = 40
FORK = 17
"""The prompts share this many leading blocks."""
PROMPTS = [[(100 if at < FORK else 1000 * (prompt + 1)) + at for at in range(LENGTH)] for prompt in range(3)]
RANKS = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
Rank = tuple[str, int]


class Bench:
    """An index, and the same told slowly: a set of blocks for each rank and tier. Both are changed together."""

    def __init__(self, max_blocks: int = 10**6) -> None:
        self.index = KvIndex(max_blocks)
        self.held: dict[Rank, dict[Tier, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.holders: dict[Rank, Holder] = {}

    def holder(self, rank: Rank) -> Holder:
        return self.holders.setdefault(rank, self.index.open(*rank))

    def store(self, rank: Rank, prompt: int, start: int, length: int, tier: Tier) -> None:
        hashes = tuple(PROMPTS[prompt][start : start + length])
        parent = PROMPTS[prompt][start - 1] if start else None
        self.index.apply(self.holder(rank), Stored(parent, hashes, tier))
        self.held[rank][tier].update(hashes)

    def remove(self, rank: Rank, prompt: int, start: int, length: int, tier: Tier, backwards: bool) -> None:
        hashes = tuple(PROMPTS[prompt][start : start + length])
        self.index.apply(self.holder(rank), Removed(hashes[::-1] if backwards else hashes, tier))
        self.held[rank][tier].difference_update(hashes)

    def clear(self, rank: Rank) -> None:
        self.index.apply(self.holder(rank), Cleared())
        self.held.pop(rank, None)

    def lose(self, rank: Rank) -> None:
        self.index.close(self.holder(rank))
        del self.holders[rank]
        self.held.pop(rank, None)

    def tidy(self, budget: int) -> None:
        self.index.tidy(budget)

    def overlap(self, rank: Rank, hashes: list[int]) -> Overlap:
        counts = dict.fromkeys(Tier, 0)
        for block in hashes:
            tier = next((tier for tier in Tier if block in self.held[rank][tier]), None)
            if tier is None:
                break
            counts[tier] += 1
        return Overlap(*counts.values())

    def check(self) -> None:
        for hashes in (*PROMPTS, PROMPTS[0][: FORK + 1], PROMPTS[1][:1], []):
            true = {rank: overlap for rank in self.holders if (overlap := self.overlap(rank, hashes)).blocks}
            assert self.index.held_by_rank(hashes) == true
            best: dict[str, int] = {}
            for (name, _), overlap in true.items():
                best[name] = max(best.get(name, 0), overlap.blocks)
            assert self.index.overlaps(hashes) == best
            held = self.index.held(hashes)
            assert all(overlap in true.values() for overlap in held.values())
            distinct, of = self.index.worker_overlaps(hashes)
            assert {name: distinct[number] for name, number in of.items()} == held
        for rank, holder in self.holders.items():
            pairs = [block for tier in Tier for block in self.held[rank][tier]]
            assert (holder.count, holder.xor) == (len(pairs), reduce(xor, pairs, 0))
            for tier in Tier:
                assert set(self.index.blocks(holder, tier)) == self.held[rank][tier]
        check_integrity(self.index)


SPAN = (st.sampled_from(RANKS), st.integers(0, 2), st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
TIERS = st.just(Tier.DEVICE) | st.sampled_from(Tier)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), *SPAN, TIERS),
        st.tuples(st.just("store"), *SPAN[:2], st.just(0), SPAN[3], TIERS),
        st.tuples(st.just("remove"), *SPAN, TIERS, st.booleans()),
        st.tuples(st.just("clear"), SPAN[0]),
        st.tuples(st.just("lose"), SPAN[0]),
        st.tuples(st.just("tidy"), st.integers(1, 60)),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(CHANGES)
def test_matches_are_exact_after_any_history_with_holes_unknown_parents_and_losses(
    changes: list[tuple[Any, ...]],
) -> None:
    bench = Bench()
    for name, *arguments in changes:
        getattr(bench, name)(*arguments)
        bench.check()


@settings(max_examples=150, deadline=None)
@given(CHANGES, st.integers(1, 30))
def test_a_full_index_claims_nothing_that_is_not_held_and_counts_what_is(
    changes: list[tuple[Any, ...]], max_blocks: int
) -> None:
    bench = Bench(max_blocks)
    for name, rank, *arguments in changes:
        if name == "store":  # each (hash, tier) once, as a worker that follows the protocol says it
            prompt, start, length, tier = arguments
            for at in range(start, min(start + length, LENGTH)):
                if PROMPTS[prompt][at] not in bench.held[rank][tier]:
                    bench.store(rank, prompt, at, 1, tier)
        elif name == "remove":
            prompt, start, length, tier, _ = arguments
            for at in range(start, min(start + length, LENGTH)):
                if PROMPTS[prompt][at] in bench.held[rank][tier]:
                    bench.remove(rank, prompt, at, 1, tier, False)
        else:
            getattr(bench, name)(rank, *arguments)
        assert len(bench.index) <= max_blocks
        for prompt in PROMPTS:
            for one, overlap in bench.index.held_by_rank(prompt).items():
                assert overlap.blocks <= bench.overlap(one, prompt).blocks
        for one, holder in bench.holders.items():
            pairs = [block for tier in Tier for block in bench.held[one][tier]]
            assert (holder.count, holder.xor) == (len(pairs), reduce(xor, pairs, 0))
        check_integrity(bench.index)


def test_a_soak_of_churn_leaves_a_true_picture() -> None:
    """For longer: TOKENMILL_SOAK_ROUNDS=100000."""
    chance, bench = random.Random(7), Bench()
    for turn in range(int(os.environ.get("TOKENMILL_SOAK_ROUNDS", "20000"))):
        rank, prompt, start = chance.choice(RANKS), chance.randrange(3), chance.randrange(LENGTH)
        length, tier = chance.randint(1, LENGTH), chance.choice([Tier.DEVICE, *Tier])
        draw = chance.random()
        if draw < 0.45:
            bench.store(rank, prompt, start if chance.random() < 0.5 else 0, length, tier)
        elif draw < 0.9:
            bench.remove(rank, prompt, start, length, tier, chance.random() < 0.7)
        elif draw < 0.96:
            bench.tidy(length)
        else:
            (bench.clear if chance.random() < 0.5 else bench.lose)(rank)
        if turn % 10 == 0:
            bench.check()
    bench.check()


def test_a_hole_ends_the_overlap_and_is_healed_when_the_block_returns() -> None:
    index, hashes = KvIndex(), list(range(1, 1500))
    worker, other = index.open("worker"), index.open("other")
    index.store(worker, None, hashes)
    index.store(other, None, hashes[:700])
    index.remove(worker, [hashes[10]])
    assert index.overlaps(hashes) == {"worker": 10, "other": 700}
    index.store(worker, hashes[9], [hashes[10]])
    assert index.overlaps(hashes) == {"worker": 1499, "other": 700}
    check_integrity(index)


def test_an_unrouted_holder_is_invisible_until_it_is_routed() -> None:
    index = KvIndex()
    early, late = index.open("early", routed=False), index.open("late", routed=False)
    index.store(early, None, [1, 2])
    assert index.overlaps([1, 2]) == {}
    index.route(early)
    index.route(late)
    index.store(late, None, [1])
    assert index.overlaps([1, 2]) == {"early": 2, "late": 1}


def test_a_lower_tier_continues_a_prefix_and_each_block_counts_at_its_fastest() -> None:
    index = KvIndex()
    worker, plain = index.open("worker"), index.open("plain")
    index.store(worker, None, [1, 2, 3], Tier.HOST)
    index.store(worker, None, [1, 2])
    index.store(worker, 3, [4], Tier.DISK)
    index.store(worker, 4, [5], Tier.PEER)
    index.store(plain, None, [1])
    prompt = [1, 2, 3, 4, 5, 6]
    assert index.held(prompt) == {"worker": Overlap(2, 1, 1, 1), "plain": Overlap(1)}
    index.remove(worker, [1, 2])
    assert index.held(prompt)["worker"] == Overlap(0, 3, 1, 1)
    index.remove(worker, [3], Tier.HOST)
    assert index.held(prompt)["worker"] == Overlap(0, 2)
    assert worker.count == 4


def test_a_worker_stands_for_the_rank_that_holds_most() -> None:
    index = KvIndex()
    for rank, depth in ((0, 2), (1, 3), (2, 1)):
        index.store(index.open("w", rank), None, [1, 2, 3][:depth])
    assert index.held([1, 2, 3, 4]) == {"w": Overlap(3)}
    assert index.held_by_rank([1, 2, 3, 4]) == {("w", 0): Overlap(2), ("w", 1): Overlap(3), ("w", 2): Overlap(1)}


def test_many_workers_are_named_like_few() -> None:
    index, hashes = KvIndex(), list(range(1, 11))
    for number in range(300):
        index.store(index.open(f"w{number}"), None, hashes[: number % 11])
    assert index.overlaps(hashes) == {f"w{number}": number % 11 for number in range(300) if number % 11}


def test_lost_workers_cost_nothing_at_once_and_are_swept_out_as_blocks_come() -> None:
    index = KvIndex()
    for life in range(50):
        worker = index.open("worker")
        index.store(worker, None, range(1 + 1000 * life, 1001 + 1000 * life))
        index.close(worker)
    assert index.overlaps([1]) == {}
    survivor = index.open("survivor")
    for at in range(4000):
        index.store(survivor, None, [10**6 + at % 100])
    assert len(index) == 100
    check_integrity(index)


def test_tidying_takes_out_what_lost_workers_left_though_nothing_comes() -> None:
    index = KvIndex()
    worker = index.open("worker")
    index.store(worker, None, range(1, 5001))
    index.close(worker)
    steps = 0
    while index.tidy(500):
        steps += 1
        assert steps < 100
    assert len(index) == 0


def test_the_bookkeeping_is_bounded_by_what_is_held() -> None:
    index = KvIndex()
    worker, other = index.open("worker"), index.open("other")
    index.store(other, None, range(1, 101))
    for _ in range(20):
        for at in range(100):
            index.store(worker, at or None, [at + 1])
        for at in reversed(range(100)):
            index.remove(worker, [at + 1])
    assert len(index.runs.all) == 1  # what was split by the changes is one again
    index.remove(other, range(1, 101))
    assert (len(index), len(index.runs.all)) == (0, 0)
    assert (worker.count, worker.xor) == (0, 0)


def test_a_full_index_forgets_the_least_recently_matched_end_first() -> None:
    index = KvIndex(max_blocks=4 * LONGEST)
    worker = index.open("worker")
    hot, cold = range(1, 2 * LONGEST + 1), range(10_001, 10_001 + 2 * LONGEST)
    index.store(worker, None, cold)
    index.store(worker, None, hot)
    index.store(worker, None, [99_999])
    assert index.overlaps([99_999]) == {"worker": 1}
    for fresh in range(50):
        index.overlaps(hot)
        index.store(worker, None, [50_000 + fresh])
    assert index.overlaps(hot) == {"worker": 2 * LONGEST}
    assert index.overlaps(cold).get("worker", 0) <= LONGEST
    assert worker.count == 4 * LONGEST + 51
    assert index.forgotten == worker.forgotten > 0
    check_integrity(index)


def test_what_lost_workers_left_makes_room_first() -> None:
    index = KvIndex(max_blocks=1000)
    lost, worker = index.open("lost"), index.open("worker")
    index.store(worker, None, range(1, 501))
    index.store(lost, None, range(1001, 1501))
    index.close(lost)
    index.store(worker, 500, range(501, 521))
    assert index.overlaps(range(1, 521)) == {"worker": 520}
    assert index.forgotten == 0


def test_more_blocks_than_there_is_room_for_are_known_from_the_first_on() -> None:
    index = KvIndex(max_blocks=10)
    worker = index.open("worker")
    index.store(worker, None, range(1, 31))
    assert index.overlaps(range(1, 31)) == {"worker": 10}
    index.remove(worker, range(30, 0, -1))
    assert (worker.count, worker.xor, worker.forgotten) == (0, 0, 0)


def test_damage_is_found_a_few_blocks_at_a_time_and_a_damaged_run_is_dropped() -> None:
    index = KvIndex()
    whole, hurt = index.open("whole"), index.open("hurt")
    for prompt in range(20):
        index.store(whole if prompt else hurt, None, range(1 + 100 * prompt, 101 + 100 * prompt))
    inspection = Inspection(index)
    assert not any(inspection.step(300) for _ in range(20))
    del index.runs.by_hash[50]
    found: dict[Holder, str] = {}
    for _ in range(20):
        found = found or inspection.step(300)
    assert found == {hurt: "a block that leads to another run"}
    assert index.overlaps(range(1, 101)) == {}
    index.close(hurt)
    check_integrity(index)


def test_a_holder_that_does_not_hold_what_it_counts_is_found_when_nothing_changes() -> None:
    index = KvIndex()
    worker, other = index.open("worker"), index.open("other")
    index.store(worker, None, [1, 2])
    index.store(other, None, [1])
    inspection = Inspection(index)
    worker.count = 3
    assert inspection.step(10) == {worker: "worker counts 3 blocks and holds 2"}
    with pytest.raises(AssertionError, match="worker counts 3 blocks and holds 2"):
        check_integrity(index)
    inspection.step(1)
    index.store(other, 1, [2])  # meanwhile, so that this pass proves nothing
    assert inspection.step(10) == {}
    worker.count, worker.xor = 2, 7
    assert inspection.step(10) == {worker: "worker's XOR is not that of its blocks"}


def test_an_event_that_names_a_block_twice_counts_it_once() -> None:
    index = KvIndex()
    worker = index.open("worker")
    index.store(worker, None, [1, 2, 1, 3])
    assert (worker.count, worker.xor) == (3, 1 ^ 2 ^ 3)
    check_integrity(index)
