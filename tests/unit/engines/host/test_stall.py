"""When an engine counts as stalled."""

from __future__ import annotations

from dataclasses import replace

from engines.base import LoadSnapshot
from engines.host.stall import READING_S, StallWatch


def reading(steps: int, *, running: int = 1, waiting: int = 0, queued: int = 0, step_s: float = 0.01) -> LoadSnapshot:
    return LoadSnapshot(
        running_requests=running,
        waiting_requests=waiting,
        queued_prefill_tokens=queued,
        step_time_s=step_s,
        steps=steps,
    )


def watched(most_tokens: int = 8192) -> StallWatch:
    """Of an engine that has made 7 steps."""
    watch = StallWatch(most_tokens, 16, 3.0)
    watch.observe(reading(6), 1)
    watch.observe(reading(7), 1)
    return watch


def wait(watch: StallWatch, seconds: float, load: LoadSnapshot, busy: int = 1) -> bool:
    for _ in range(round(seconds / READING_S)):
        watch.observe(load, busy)
    return watch.stalled


def test_an_engine_with_requests_that_makes_no_step_for_three_seconds_is_stalled() -> None:
    watch = watched()
    assert not wait(watch, 3.0, reading(7))
    assert wait(watch, READING_S, reading(7))
    assert watch.still_s == 3.25


def test_it_is_well_again_with_its_next_step_and_only_then() -> None:
    watch = watched()
    assert wait(watch, 4.0, reading(7))
    assert wait(watch, 1.0, reading(7, running=0), busy=0), "its requests were given up; that proves nothing"
    assert not wait(watch, READING_S, reading(8))


def test_an_idle_engine_may_stand_still() -> None:
    assert not wait(watched(), 60.0, reading(7, running=0), busy=0)


def test_an_engine_that_has_not_even_noticed_its_request_is_stalled() -> None:
    assert wait(watched(), 4.0, reading(7, running=0), busy=1)


def test_prompts_that_find_no_room_beside_blocks_held_for_readers_need_no_step() -> None:
    full = LoadSnapshot(
        waiting_requests=3, queued_prefill_tokens=200, kv_total_blocks=100, kv_used_blocks=90, kv_leases=2,
        step_time_s=0.01, steps=7,
    )  # fmt: skip
    assert not wait(watched(), 60.0, full, busy=3)
    assert wait(watched(), 10.0, replace(full, kv_used_blocks=80), busy=3), "they would fit"
    assert wait(watched(), 10.0, replace(full, kv_leases=0), busy=3)


def test_slow_steps_are_given_five_times_their_time() -> None:
    watch = StallWatch(8192, 16, 3.0)
    watch.observe(reading(7, step_s=2.0), 1)
    assert not wait(watch, 10.0, reading(7, step_s=2.0))
    assert wait(watch, READING_S, reading(7, step_s=2.0))


def test_a_long_prompt_is_given_its_time_from_when_its_step_began() -> None:
    watch = watched()
    watch.observe(reading(8, queued=8000), 1)
    assert not wait(watch, 60.0, reading(8, queued=8000)), "two milliseconds a token, five times"
    watch = watched()
    assert wait(watch, 1.0, reading(7)) is False
    assert wait(watch, 3.0, reading(7, queued=8000)), "came later: it is not in the step that hangs"


def test_no_more_prompt_tokens_count_than_a_step_can_hold() -> None:
    watch = watched(most_tokens=2048)
    watch.observe(reading(8, queued=1_000_000), 1)
    assert wait(watch, 25.0, reading(8, queued=1_000_000))


def test_the_time_of_a_prompt_token_is_learned_from_what_the_engine_does() -> None:
    watch = watched()
    queued = 1_000_000
    for steps in range(8, 60):
        queued -= 8192
        watch.observe(reading(steps, queued=queued), 1)
    assert watch.allowance_s == 3.0
    assert wait(watch, 3.5, reading(59, queued=queued))
    watch.observe(reading(60, queued=queued), 1)
    wait(watch, 2.0, reading(60, queued=queued))
    watch.observe(reading(61, queued=queued - 8192), 1)
    assert watch.allowance_s > 8.0, "slower is believed at once"


def test_the_first_step_may_take_long() -> None:
    watch = StallWatch(8192, 16, 3.0)
    assert not wait(watch, 120.0, reading(0, step_s=0.0))
    assert watch.still_s > 119.0


def test_an_engine_on_shared_processors_is_given_longer() -> None:
    watch = StallWatch(8192, 16, 15.0)
    watch.observe(reading(6), 1)
    assert not wait(watch, 15.0, reading(6))
    assert wait(watch, READING_S, reading(6))
