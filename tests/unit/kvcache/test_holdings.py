from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import xor

from hypothesis import given
from hypothesis import strategies as st

from kvcache.events import Cleared, KvEvent, Removed, Stored, Tier
from kvcache.holdings import Holdings

BLOCKS = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple)
TIERS = st.sampled_from(Tier)
EVENTS = st.lists(
    st.one_of(
        st.builds(Stored, st.none() | st.integers(1, 8), BLOCKS, TIERS),
        st.builds(Removed, BLOCKS, TIERS),
        st.just(Cleared()),
    ),
    max_size=40,
)


@given(EVENTS)
def test_holdings_count_copies_and_their_news_describe_the_set(events: list[KvEvent]) -> None:
    holdings, copies, told = Holdings(), Counter[tuple[int, Tier]](), set[tuple[int, Tier]]()
    for event in events:
        for news in holdings.apply([event]):
            match news:
                case Stored(_, hashes, tier):
                    pairs = {(block, tier) for block in hashes}
                    assert len(pairs) == len(hashes)
                    assert not pairs & told
                    told |= pairs
                case Removed(hashes, tier):
                    pairs = {(block, tier) for block in hashes}
                    assert pairs <= told
                    told -= pairs
                case Cleared():
                    told.clear()
        match event:
            case Stored(_, hashes, tier):
                copies.update((block, tier) for block in hashes)
            case Removed(hashes, tier):
                for block in hashes:
                    copies[block, tier] = max(0, copies[block, tier] - 1)
            case Cleared():
                copies.clear()
        held = {pair for pair, count in copies.items() if count}
        assert told == held
        assert {(block, tier) for tier in Tier for block in holdings.hashes(tier)} == held
        assert holdings.count == len(held)
        assert holdings.xor == reduce(xor, (block for block, _ in held), 0)
        holdings.check_integrity()


def test_a_run_with_a_known_block_inside_is_told_in_two_parts_with_their_parents() -> None:
    holdings = Holdings()
    holdings.apply([Stored(1, (2,))])
    assert holdings.apply([Stored(None, (1, 2, 3))]) == [Stored(None, (1,)), Stored(2, (3,))]
    assert dict(zip(holdings.hashes(), holdings.parents(), strict=True)) == {2: 1, 1: None, 3: 2}
