from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.events import Cleared, Removed, Stored, Tier
from kvcache.index import LEAP, Holder, KvIndex

LENGTH = 3 * LEAP
FORK = LEAP + 5
"""The prompts share this many leading blocks."""
PROMPTS = [[(100 if at < FORK else 1000 * (prompt + 1)) + at for at in range(LENGTH)] for prompt in range(3)]
WORKERS = ["a", "b", "c"]


@dataclass
class Model:
    """The same told slowly: a set of blocks a worker and tier."""

    held: dict[str, dict[Tier, set[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))

    def depth(self, worker: str, hashes: list[int]) -> int:
        depth = 0
        while depth < len(hashes) and hashes[depth] in self.held[worker][Tier.DEVICE]:
            depth += 1
        return depth


@dataclass
class Bench:
    """An index and its model, changed together."""

    index: KvIndex = field(default_factory=KvIndex)
    model: Model = field(default_factory=Model)
    holders: dict[str, Holder] = field(default_factory=dict)

    def holder(self, worker: str) -> Holder:
        return self.holders.setdefault(worker, self.index.open(worker))

    def store(self, worker: str, prompt: int, start: int, length: int, tier: Tier) -> None:
        hashes = PROMPTS[prompt][start : start + length]
        parent = PROMPTS[prompt][start - 1] if start else None
        self.index.apply(self.holder(worker), Stored(parent, tuple(hashes), tier))
        self.model.held[worker][tier].update(hashes)

    def remove(self, worker: str, prompt: int, start: int, length: int, tier: Tier) -> None:
        hashes = PROMPTS[prompt][start : start + length]
        self.index.apply(self.holder(worker), Removed(tuple(reversed(hashes)), tier))
        self.model.held[worker][tier].difference_update(hashes)

    def clear(self, worker: str) -> None:
        self.index.apply(self.holder(worker), Cleared())
        self.model.held.pop(worker, None)

    def lose(self, worker: str) -> None:
        self.index.close(self.holder(worker))
        del self.holders[worker]
        self.model.held.pop(worker, None)

    def check(self) -> None:
        for prompt in PROMPTS:
            for hashes in (prompt, prompt[: FORK + 1], prompt[:1], []):
                depths = {worker: self.model.depth(worker, hashes) for worker in WORKERS}
                assert self.index.overlaps(hashes) == {worker: depth for worker, depth in depths.items() if depth}
        for worker, holder in self.holders.items():
            for tier in Tier:
                assert set(self.index.blocks(holder, tier)) == self.model.held[worker][tier]
        self.index.check_integrity(self.holders.values())


SPAN = (st.sampled_from(WORKERS), st.integers(0, 2), st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
ROUTED = st.just(Tier.DEVICE) | st.sampled_from(Tier)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), *SPAN, ROUTED),
        st.tuples(st.just("store"), *SPAN[:2], st.just(0), SPAN[3], ROUTED),
        st.tuples(st.just("remove"), *SPAN, ROUTED),
        st.tuples(st.just("clear"), SPAN[0]),
        st.tuples(st.just("lose"), SPAN[0]),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(CHANGES)
def test_matches_are_exact_after_any_history_with_holes_unknown_parents_and_losses(
    changes: list[tuple[str, *tuple[object, ...]]],
) -> None:
    bench = Bench()
    for name, *arguments in changes:
        getattr(bench, name)(*arguments)
        bench.check()


def test_a_hole_is_seen_by_the_next_match_and_healed_when_the_block_returns() -> None:
    index, hashes = KvIndex(), PROMPTS[0]
    worker, other = index.open("worker"), index.open("other")
    index.store(worker, None, hashes)
    index.store(other, None, hashes[:70])
    index.remove(worker, [hashes[10]])
    assert index.overlaps(hashes) == {"worker": 10, "other": 70}
    index.store(worker, hashes[9], [hashes[10]])
    assert index.overlaps(hashes) == {"worker": LENGTH, "other": 70}
    index.check_integrity([worker, other])


def test_an_unrouted_holder_is_invisible_until_it_is_routed() -> None:
    index = KvIndex()
    early, late = index.open("early", routed=False), index.open("late", routed=False)
    index.store(early, None, [1, 2])
    assert index.overlaps([1, 2]) == {}
    index.route(early)
    index.route(late)
    index.store(late, None, [1])
    assert index.overlaps([1, 2]) == {"early": 2, "late": 1}


def test_lower_tiers_are_kept_but_not_matched() -> None:
    index = KvIndex()
    holder = index.open("worker")
    index.store(holder, None, [1, 2])
    index.store(holder, 2, [3], Tier.HOST)
    assert index.overlaps([1, 2, 3]) == {"worker": 2}
    assert index.blocks(holder, Tier.HOST) == [3]
    assert (holder.count, holder.xor) == (3, 1 ^ 2 ^ 3)


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
    index.check_integrity([survivor])


def test_the_bookkeeping_is_bounded_by_what_is_held() -> None:
    index = KvIndex()
    worker = index.open("worker")
    for turn in range(200):
        hashes = range(1 + 100 * turn, 101 + 100 * turn)
        index.store(worker, None, hashes)
        index.remove(worker, reversed(hashes))
    assert len(index) == 0
    index.remove(worker, [1])
    assert (worker.count, worker.xor) == (0, 0)
    index.check_integrity([worker])


def test_a_broken_invariant_is_named() -> None:
    index = KvIndex()
    worker = index.open("worker")
    index.store(worker, None, [1, 2])
    worker.count = 3
    with pytest.raises(AssertionError, match="worker counts 3 blocks and holds 2"):
        index.check_integrity([worker])
