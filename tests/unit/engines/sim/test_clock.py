from __future__ import annotations

import math
import time

import pytest

from engines.sim.clock import PacedClock


@pytest.mark.parametrize("time_scale", [0, math.inf])
async def test_without_pace_no_time_passes(time_scale: float) -> None:
    clock = PacedClock(time_scale)
    start = time.monotonic()
    for _ in range(100):
        await clock.let_pass(10)
    assert time.monotonic() - start < 5


async def test_steps_shorter_than_a_timer_add_up() -> None:
    clock = PacedClock(10)
    clock.rest()
    start = time.monotonic()
    for _ in range(1000):
        await clock.let_pass(0.002)
    assert 0.195 <= time.monotonic() - start < 2


async def test_a_small_lag_is_made_up_for_and_rest_is_not() -> None:
    clock = PacedClock(1)
    took_s = []
    for _ in range(10):  # the machine itself may be late in some
        clock.rest()
        time.sleep(0.03)  # noqa: ASYNC251 - the loop is meant to be late
        start = time.monotonic()
        await clock.let_pass(0.02)
        took_s.append(time.monotonic() - start)
    assert min(took_s) < 0.01
    time.sleep(0.03)  # noqa: ASYNC251
    clock.rest()
    start = time.monotonic()
    await clock.let_pass(0.02)
    assert time.monotonic() - start >= 0.018
