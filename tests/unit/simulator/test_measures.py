from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.sim.scheduler import Coast
from simulator.measures import Distribution, Gaps, percentile


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, percent) for percent in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([], 50) == 0


def test_a_distribution_is_in_milliseconds() -> None:
    assert Distribution.of([0.001, 0.003]) == Distribution(mean=2.0, p50=1.0, p90=3.0, p99=3.0)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 10**10), st.integers(0, 10**8))
def test_many_steps_at_once_count_as_each_by_itself(steps: int, batch: int, first: int, growth: int) -> None:
    at_once, singly = Gaps(), Gaps()
    coast = Coast(steps, batch, first, growth)
    at_once.add_coast(coast, steps)
    for step in range(steps):
        singly.add(batch, first + step * growth)
    assert at_once.distribution() == singly.distribution()


@given(st.integers(1, 400), st.integers(1, 10**6), st.integers(0, 10**4), st.integers(0, 10**9))
def test_as_many_steps_have_begun_as_the_time_says(steps: int, first: int, growth: int, elapsed: int) -> None:
    coast = Coast(steps, 1, first, growth)
    begun = coast.begun(elapsed)
    assert 1 <= begun <= steps
    assert coast.duration_ps(begun - 1) <= elapsed
    assert begun == steps or elapsed < coast.duration_ps(begun)
    assert coast.duration_ps(steps) == coast.duration_ps(begun) + coast.after(begun).duration_ps(steps - begun)
