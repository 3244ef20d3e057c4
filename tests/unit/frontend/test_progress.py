"""When an answer is stuck though its worker lives."""

from __future__ import annotations

from dataclasses import replace

from services.frontend.progress import Progress, Pulse

IDLE = Pulse(waiting_requests=0, queued_prefill_tokens=0, step_time_s=0.01, steps=0)
FULL = Pulse(waiting_requests=1, queued_prefill_tokens=0, step_time_s=0.01, steps=0)
PREFILLS = Pulse(waiting_requests=0, queued_prefill_tokens=9, step_time_s=0.01, steps=0)
SLOW = Pulse(waiting_requests=0, queued_prefill_tokens=0, step_time_s=2.0, steps=0)


def pulses_until_stuck(progress: Progress, pulse: Pulse, emitted: int, most: int = 1000) -> int | None:
    for count in range(1, most):
        if progress.is_stuck(emitted, pulse):
            return count
    return None


def begun() -> Progress:
    progress = Progress(0)
    assert not progress.is_stuck(5, IDLE)
    return progress


def test_an_answer_that_gets_nothing_for_more_than_three_pulses_is_stuck() -> None:
    assert pulses_until_stuck(begun(), IDLE, 5) == 4


def test_a_token_begins_the_count_anew() -> None:
    progress = begun()
    for emitted in range(6, 60):
        for _ in range(3):
            assert not progress.is_stuck(emitted, IDLE)


def test_slow_steps_are_given_five_times_their_time() -> None:
    assert pulses_until_stuck(begun(), SLOW, 5) == 11


def test_an_answer_that_may_have_been_put_back_is_left_where_it_is() -> None:
    assert pulses_until_stuck(begun(), FULL, 5) is None
    assert pulses_until_stuck(begun(), PREFILLS, 5) is None


def test_a_busy_worker_hides_a_stuck_answer_only_for_a_while() -> None:
    progress = begun()
    pulses = [IDLE, FULL] * 4
    assert [progress.is_stuck(5, pulse) for pulse in pulses] == [False] * 6 + [True] * 2


def test_the_first_token_on_a_worker_may_take_longer() -> None:
    assert pulses_until_stuck(Progress(0), IDLE, 0) == 16
    assert pulses_until_stuck(Progress(7), IDLE, 7) == 16


def test_an_engine_that_makes_no_step_is_its_workers_to_judge() -> None:
    still = replace(IDLE, steps=7)
    progress = begun()
    assert pulses_until_stuck(progress, still, 5) is None
    assert [progress.is_stuck(5, replace(IDLE, steps=steps)) for steps in (8, 9, 10)] == [False, False, True]


def test_but_not_before_the_first_token_when_it_may_have_nothing_to_do() -> None:
    assert pulses_until_stuck(Progress(0), replace(IDLE, steps=7), 0) == 16
