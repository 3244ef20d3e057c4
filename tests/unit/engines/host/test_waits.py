"""Which requests wait in vain: told at once, by the pace of those before them."""

from __future__ import annotations

import pytest

from controlplane.errors import Overloaded
from engines.host.waits import Waits


def at_ten_a_second(longest_s: float = 10.0) -> Waits:
    waits = Waits(longest_s)
    for number in range(100):
        waits.begun(number / 10, waiting=50)
    return waits


def test_a_wait_is_those_before_times_their_pace() -> None:
    assert at_ten_a_second().expected_s(9.9, 50) == pytest.approx(5.0, rel=0.05)


def test_a_stop_makes_waits_longer_without_a_new_start() -> None:
    waits = at_ten_a_second()
    assert waits.expected_s(60.0, 50) > waits.expected_s(9.9, 50)


def test_who_would_wait_longer_than_anyone_may_is_refused_with_a_hint() -> None:
    waits = at_ten_a_second(longest_s=3.0)
    waits.check(9.9, 20, None)
    with pytest.raises(Overloaded, match="50 requests wait here") as refused:
        waits.check(9.9, 50, None)
    assert refused.value.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_who_cannot_wait_so_long_is_refused_though_others_can() -> None:
    waits = at_ten_a_second()
    waits.check(9.9, 50, 8.0)
    with pytest.raises(Overloaded):
        waits.check(9.9, 50, 2.0)


def test_nobody_is_refused_before_there_is_a_pace_nor_after_the_queue_was_empty() -> None:
    waits = Waits(0.1)
    for number in range(7):
        waits.begun(float(number), waiting=5)
        waits.check(float(number), 1000, 0.001)
    waits = at_ten_a_second(0.1)
    waits.begun(10.0, waiting=0)
    waits.check(10.0, 1000, 0.001)
