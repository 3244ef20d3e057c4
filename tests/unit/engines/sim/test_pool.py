from __future__ import annotations

import pytest

from engines.sim.pool import BlockPool
from kvcache.events import Cleared, Removed, Stored


def test_a_freed_block_is_found_by_its_hash_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(None, [block], [10])
    pool.free([block])
    assert pool.find([10, 11], 9) == [block]
    assert pool.available == 2
    pool.allocate()
    assert pool.find([10], 9) == [block]
    assert pool.allocate() == block
    assert pool.find([10], 9) == []
    assert pool.drain_events() == [Stored(None, (10,)), Removed((10,))]


def test_the_least_recently_used_goes_first_and_of_one_prompt_the_end() -> None:
    pool = BlockPool(4)
    old, new = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    pool.publish(None, old, [1, 2])
    pool.publish(None, new, [3, 4])
    pool.free(old)
    pool.free(new)
    pool.drain_events()
    for _ in range(4):
        pool.allocate()
    assert pool.drain_events() == [Removed((2, 1, 4, 3))]


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(), pool.allocate(), pool.allocate()
    pool.publish(None, [first], [1])
    pool.publish(None, [second, third], [1, 2])
    pool.free([second])
    assert pool.find([1, 2], 9) == [first, third]
    assert pool.drain_events() == [Stored(None, (1,)), Stored(1, (2,))]
    pool.check_integrity([[first], [third]])


def test_a_shared_block_stays_in_use_until_its_last_user_is_gone() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.publish(None, [block], [1])
    pool.share([block])
    pool.free([block])
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.allocate()
    pool.free([block])
    assert pool.available == 1


def test_it_forgets_all_hashes_only_while_nothing_is_in_use() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(None, [block], [1])
    assert not pool.clear()
    pool.free([block])
    pool.drain_events()
    assert pool.clear()
    assert pool.find([1], 9) == []
    assert pool.drain_events() == [Cleared()]
    pool.check_integrity([])


def test_a_wrong_count_is_noticed() -> None:
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError):
        pool.check_integrity([])
