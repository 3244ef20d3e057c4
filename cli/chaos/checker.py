"""Holds what a client saw against what it had to see. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cli.chaos.asks import Ask

__all__ = ["LEAVING", "End", "Expected", "Judgement", "Seen", "Verdict", "judge"]


LEAVING = "frontend that finishes what it has begun"


@dataclass(frozen=True, slots=True)
class Expected:
    """The one right answer."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish: str = "length"


class End(StrEnum):
    """How a request ended for its client."""

    COMPLETE = "complete"
    HUNG_UP = "the client went away"
    TIMED_OUT = "its deadline was over"
    REFUSED = "refused, with a time to come back"
    FRONTEND_GONE = "the frontend it asked was taken away"
    FAILED = "failed"
    SILENT = "no end came"


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a client got from one frontend for one request."""

    end: End
    text: str = ""
    finish: str = ""
    usage: tuple[int, int] | None = None
    """Prompt tokens, completion tokens."""
    why: str = ""
    """The error, for people."""


class Verdict(StrEnum):
    """What one request adds to the report."""

    RIGHT = "right"
    CANCELLED = "cancelled"
    """As its client wanted, or at the deadline it set."""
    REFUSED = "refused"
    WRONG = "wrong"
    LOST = "lost"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason, which is empty for what is right."""

    verdict: Verdict
    why: str = ""


def judge(ask: Ask, expected: Expected, attempts: Sequence[Seen], disturbed: Collection[str]) -> Judgement:
    """Of a request's attempts, each on one frontend, the last decides; no text of any may be wrong.

    `disturbed`: the roles that a fault was at work on in its time. With any, it may be refused in the end; with
    "frontend", the one that it asked may be gone; with `LEAVING`, only for those who come too late. A hasty one may be
    told at any time that it would have to wait too long.
    """
    for seen in attempts:
        if why := _text_fault(expected.text, seen.text):
            return Judgement(Verdict.WRONG, why)
        excused = "frontend" in disturbed or (LEAVING in disturbed and not seen.text)
        if seen.end is End.FRONTEND_GONE and not excused:
            return Judgement(Verdict.LOST, f"{seen.end}, by no fault of ours: {seen.why}")
    last = attempts[-1]
    match last.end:
        case End.COMPLETE:
            why = _ending_fault(expected, last)
            return Judgement(Verdict.WRONG, why) if why else Judgement(Verdict.RIGHT)
        case End.HUNG_UP:
            return Judgement(Verdict.CANCELLED)
        case End.TIMED_OUT if ask.hasty:
            return Judgement(Verdict.CANCELLED)
        case End.REFUSED if disturbed or ask.hasty:
            return Judgement(Verdict.REFUSED, last.why)
        case End.TIMED_OUT | End.SILENT:
            return Judgement(Verdict.HUNG, last.why or f"no end within {ask.deadline_s:g} s")
        case _:
            return Judgement(Verdict.LOST, f"{last.end}{'' if disturbed else ', with no fault at work'}: {last.why}")


def _text_fault(expected: str, text: str) -> str:
    """Any part of an answer must be how the right one begins."""
    if expected.startswith(text):
        return ""
    same = next(
        (i for i, (right, came) in enumerate(zip(expected, text, strict=False)) if right != came), len(expected)
    )
    return f"at character {same} came {text[same : same + 24]!r}, not {expected[same : same + 24]!r}"


def _ending_fault(expected: Expected, seen: Seen) -> str:
    if seen.text != expected.text:
        return f"the text stops after {len(seen.text)} of {len(expected.text)} characters"
    if seen.finish != expected.finish:
        return f"finish reason {seen.finish!r}, not {expected.finish!r}"
    counts = expected.prompt_tokens, expected.completion_tokens
    if seen.usage != counts:
        return f"usage {seen.usage}, not {counts} (prompt, completion)"
    return ""
