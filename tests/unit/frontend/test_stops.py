"""Stop strings against a slow model that looks at one character at a time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.stops import StopStrings


def by_character(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


few_letters = st.text(alphabet="abc\n👋", max_size=40)
some_stops = st.lists(st.text(alphabet="abc\n👋", min_size=1, max_size=5), min_size=1, max_size=4)


@given(few_letters, some_stops, st.lists(st.integers(0, 6), max_size=20))
def test_the_answer_ends_at_the_first_complete_stop_string_however_it_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopStrings(stops)
    shown, ended = "", False
    for piece in cut(text, sizes):
        new, ended = matcher.feed(piece)
        shown += new
        if ended:
            break
    shown += matcher.finish()
    assert (shown, ended) == by_character(text, stops)


@given(few_letters, some_stops)
def test_only_what_may_begin_a_stop_string_is_kept_back(text: str, stops: list[str]) -> None:
    text, ended = by_character(text, stops)
    if ended:
        return
    shown, _ = StopStrings(stops).feed(text)
    held = text[len(shown) :]
    assert not held or any(stop.startswith(held) for stop in stops)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    assert StopStrings(["###"]).feed("hello ") == ("hello ", False)
