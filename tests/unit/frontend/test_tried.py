"""Which workers an answer may have after some have failed it."""

from __future__ import annotations

import pytest

from controlplane.errors import Draining, EngineFailed, Overloaded, Stalled, TokenmillError, Unavailable
from services.frontend.tried import Seen, Tried, may_be_replaced

LOST = Unavailable("lost")


def tried(error: TokenmillError = LOST) -> Tried:
    failed = Tried()
    failed.add("decode-1", 5, "stream-1", error)
    return failed


@pytest.mark.parametrize(
    ("seen", "excluded"),
    [
        (Seen(5, "stream-1"), True),
        (Seen(5, ""), True),
        (Seen(4, "stream-2"), False),  # it has opened another stream since, whatever discovery shows
        (Seen(5, "stream-2"), False),
        (Seen(5, "stream-2", ready=False), True),
        (Seen(6, ""), False),
        (Seen(6, "", ready=False), False),
    ],
)
def test_a_lost_worker_may_have_the_answer_again_once_it_is_back(seen: Seen, excluded: bool) -> None:
    assert tried().excludes("decode-1", seen) is excluded
    assert not tried().excludes("decode-2", seen)


@pytest.mark.parametrize("error", [EngineFailed("boom"), Overloaded("full"), Draining("leaving")])
def test_a_worker_that_lives_and_failed_the_answer_never_has_it_again_in_this_life(error: TokenmillError) -> None:
    assert tried(error).excludes("decode-1", Seen(5, "stream-2"))
    assert not tried(error).excludes("decode-1", Seen(6, "stream-2"))


def test_one_that_is_back_is_the_second_choice_and_a_new_one_is_not() -> None:
    assert tried().is_second_choice("decode-1", Seen(5, "stream-2"))
    assert not tried().is_second_choice("decode-1", Seen(6, "stream-2"))
    assert not tried().is_second_choice("decode-2", Seen(5, "stream-2"))


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (None, True),
        (LOST, True),
        (Stalled("hangs"), True),
        (Draining("leaving"), True),
        (Overloaded("full"), False),
        (EngineFailed("boom"), False),
    ],
)
def test_a_replacement_is_waited_for_only_where_one_may_come(error: TokenmillError | None, waits: bool) -> None:
    assert may_be_replaced(error) is waits
