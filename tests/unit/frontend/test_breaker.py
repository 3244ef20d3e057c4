"""Which instances are avoided, and when they are tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.breaker import Breaker, Breakers, BreakerState, Outcome

GOOD, BROKEN, NOTHING = Outcome.GOOD, Outcome.BROKEN, Outcome.NOTHING


def after(*outcomes: Outcome, now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for outcome in outcomes:
        breaker.began(now)
        breaker.ended(outcome, now)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "avoided"),
    [
        ([], False),
        ([BROKEN, BROKEN], False),
        ([BROKEN, BROKEN, BROKEN], True),
        ([BROKEN, BROKEN, GOOD, BROKEN, BROKEN], False),
        ([BROKEN, BROKEN, NOTHING, BROKEN], True),
        ([NOTHING] * 100, False),
        ([GOOD, BROKEN] * 4, True),
        ([GOOD, BROKEN] * 3, False),  # too few to tell
        ([GOOD, GOOD, BROKEN] * 30, False),
    ],
)
def test_failures_in_a_row_and_half_of_many_are_avoided(outcomes: list[Outcome], avoided: bool) -> None:
    assert after(*outcomes).avoids(0.0) is avoided


def test_one_call_at_a_time_tries_it_again_and_its_answer_decides() -> None:
    breaker = after(BROKEN, BROKEN, BROKEN)
    assert breaker.avoids(0.9)
    assert not breaker.avoids(1.0)
    breaker.began(1.0)
    assert breaker.avoids(1.0), "another call waits for what comes of this one"
    breaker.ended(GOOD, 1.5)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.avoids(1.5)


def test_a_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = after(BROKEN, BROKEN, BROKEN), 0.0, []
    for _ in range(8):
        opened = now
        while breaker.avoids(now):
            now += 0.5
        pauses.append(now - opened)
        breaker.began(now)
        breaker.ended(BROKEN, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    now += 30
    assert not breaker.avoids(now)
    breaker.began(now)
    breaker.ended(GOOD, now)
    for _ in range(3):
        breaker.ended(BROKEN, now)
    assert not breaker.avoids(now + 1.0), "the pause begins anew"


def test_a_probe_that_shows_nothing_lets_the_next_call_be_one() -> None:
    breaker = after(BROKEN, BROKEN, BROKEN)
    assert not breaker.avoids(1.0)
    breaker.began(1.0)
    breaker.ended(NOTHING, 2.0)
    assert not breaker.avoids(2.0)
    breaker.began(2.0)
    assert breaker.avoids(61.0)
    assert not breaker.avoids(62.0), "nothing was ever heard of it"


def test_a_good_answer_to_a_call_that_went_there_all_the_same_closes_it() -> None:
    breaker = after(BROKEN, BROKEN, BROKEN)
    breaker.began(0.1)
    breaker.ended(GOOD, 0.2)
    assert not breaker.avoids(0.2)


def test_a_new_life_of_an_instance_is_not_blamed_for_the_old_one() -> None:
    changes: list[tuple[str, str]] = []
    breakers = Breakers(lambda instance_id, state: changes.append((instance_id, state)))
    for _ in range(3):
        breakers.began("decode-1", 1, 0.0)
    for _ in range(3):
        breakers.ended("decode-1", 1, BROKEN, 0.0)
    assert breakers.avoided(0.0) == ["decode-1"]
    breakers.began("decode-1", 2, 0.0)
    breakers.ended("decode-1", 1, BROKEN, 0.0)
    assert breakers.avoided(0.0) == []
    assert changes == [("decode-1", "open")]
    assert (breakers.count(BreakerState.CLOSED), breakers.count(BreakerState.OPEN)) == (1, 0)
    breakers.keep([])
    assert breakers.count(BreakerState.CLOSED) == 0


steps = st.lists(st.tuples(st.sampled_from(["begin", *Outcome]), st.floats(0, 20)), max_size=200)


@given(steps)
def test_nothing_is_avoided_for_ever(script: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for what, passes in script:
        now += passes
        if what == "begin":
            breaker.began(now)
        else:
            breaker.ended(Outcome(what), now)
        assert not breaker.avoids(now + 60.0)
