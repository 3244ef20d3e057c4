from dataclasses import replace

import pytest

from cli.chaos.asks import Ask, Face
from cli.chaos.checker import LEAVING, End, Expected, Seen, Verdict, judge

ASK = Ask(1, Face.COMPLETIONS, stream=True, prompt="Why?", max_tokens=4, deadline_s=60)
RIGHT = Expected(" one two three four", 5, 4)
GOOD = Seen(End.COMPLETE, RIGHT.text, "length", (5, 4))
CALM = frozenset[str]()


def test_the_right_answer_is_right() -> None:
    assert judge(ASK, RIGHT, [GOOD], CALM).verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text": " one two three five"}, "at character 16"),
        ({"text": " one two two three four"}, "at character 10"),
        ({"text": " one three four"}, "at character 6"),
        ({"text": " one two three four four"}, "at character 19"),
        ({"text": " one two three"}, "stops after 14 of 19"),
        ({"text": ""}, "stops after 0"),
        ({"finish": "stop"}, "finish reason 'stop'"),
        ({"usage": (5, 5)}, "usage (5, 5)"),
        ({"usage": (9, 4)}, "usage (9, 4)"),
        ({"usage": None}, "usage None"),
    ],
)
def test_whatever_differs_is_wrong_and_the_reason_says_where(change: dict[str, object], why: str) -> None:
    judgement = judge(ASK, RIGHT, [replace(GOOD, **change)], {"decode", "frontend"})  # type: ignore[arg-type]
    assert judgement.verdict is Verdict.WRONG
    assert why in judgement.why


@pytest.mark.parametrize("end", [end for end in End if end is not End.COMPLETE])
def test_wrong_text_is_wrong_however_the_answer_ended(end: End) -> None:
    assert judge(ASK, RIGHT, [Seen(end, " one tow")], {"frontend"}).verdict is Verdict.WRONG


def test_wrong_text_of_an_earlier_attempt_counts_too() -> None:
    first = Seen(End.FRONTEND_GONE, " one tow")
    assert judge(ASK, RIGHT, [first, GOOD], {"frontend"}).verdict is Verdict.WRONG


def test_a_request_that_failed_is_lost_fault_or_not() -> None:
    failed = Seen(End.FAILED, " one", why="HTTP 500")
    assert judge(ASK, RIGHT, [failed], {"decode"}).verdict is Verdict.LOST
    assert judge(ASK, RIGHT, [failed], CALM).verdict is Verdict.LOST


def test_a_frontend_may_be_gone_only_when_a_fault_took_it() -> None:
    gone = Seen(End.FRONTEND_GONE, " one")
    assert judge(ASK, RIGHT, [gone, GOOD], {"frontend"}).verdict is Verdict.RIGHT
    assert judge(ASK, RIGHT, [gone, GOOD], {"decode"}).verdict is Verdict.LOST
    assert judge(ASK, RIGHT, [gone, GOOD], CALM).verdict is Verdict.LOST
    assert judge(ASK, RIGHT, [gone], {"frontend"}).verdict is Verdict.LOST  # nobody answered in the end


def test_a_frontend_that_leaves_may_be_gone_only_for_those_who_come_too_late() -> None:
    assert judge(ASK, RIGHT, [Seen(End.FRONTEND_GONE), GOOD], {LEAVING}).verdict is Verdict.RIGHT
    assert judge(ASK, RIGHT, [Seen(End.FRONTEND_GONE, " one"), GOOD], {LEAVING}).verdict is Verdict.LOST


def test_a_refusal_in_the_end_is_excused_by_a_fault_alone() -> None:
    refused = Seen(End.REFUSED, why="HTTP 503")
    assert judge(ASK, RIGHT, [refused], {"decode"}).verdict is Verdict.REFUSED
    assert judge(ASK, RIGHT, [refused], CALM).verdict is Verdict.LOST
    assert judge(ASK, RIGHT, [refused, GOOD], CALM).verdict is Verdict.RIGHT


def test_no_end_in_time_has_hung() -> None:
    for end in (End.SILENT, End.TIMED_OUT):
        assert judge(ASK, RIGHT, [Seen(end, " one")], {"decode"}).verdict is Verdict.HUNG


def test_a_client_that_went_away_or_wanted_too_much_is_cancelled() -> None:
    assert judge(ASK, RIGHT, [Seen(End.HUNG_UP, " one")], CALM).verdict is Verdict.CANCELLED
    hasty = replace(ASK, hasty=True)
    assert judge(hasty, RIGHT, [Seen(End.TIMED_OUT, " one")], CALM).verdict is Verdict.CANCELLED
    assert judge(hasty, RIGHT, [Seen(End.REFUSED, why="too long")], CALM).verdict is Verdict.REFUSED
    assert judge(hasty, RIGHT, [Seen(End.SILENT, " one")], CALM).verdict is Verdict.HUNG
