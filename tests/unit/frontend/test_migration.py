"""What becomes of an answer whose worker failed it."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    TokenmillError,
    Unavailable,
    Unsupported,
)
from engines.base import SamplingParams
from services.frontend.migration import FrontendFailed, FrontendStops, Move, next_move

LOST = Unavailable("the worker was lost", retry_after_s=2)
SEEDED = {"seed": 7}
RESUME, RESTART = Move.RESUME, Move.RESTART


def move(error: TokenmillError = LOST, **facts: Any) -> Move:
    sampling = SamplingParams(**facts.pop("sampling", {}))
    return next_move(error, sampling, **{"tries_left": 1, "emitted": 5, "sent": True, "migration": True} | facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, RESUME),
        ({"sent": False}, RESUME),
        ({"emitted": 0, "sent": False}, RESTART),
        ({"sampling": {"temperature": 0.0}}, RESUME),
        ({"sampling": {"temperature": 0.0, **SEEDED}}, RESUME),  # greedy: the seed changes nothing
        ({"sampling": {"min_tokens": 9, "max_tokens": 10, "logprobs": 3, "stop_token_ids": (1,)}}, RESUME),
        ({"sampling": {"ignore_eos": True, "top_p": 0.5, "top_k": 3, "min_p": 0.1}}, RESUME),
        ({"sampling": SEEDED, "sent": False}, RESTART),
        ({"sampling": {"presence_penalty": 1.0}, "sent": False}, RESTART),
        ({"sampling": {"frequency_penalty": -1.0}, "sent": False}, RESTART),
        ({"sampling": {"repetition_penalty": 1.1}, "sent": False}, RESTART),
        ({"migration": False, "sent": False}, RESTART),
        ({"error": EngineFailed("boom")}, RESUME),
        ({"error": Overloaded("no room")}, RESUME),
    ],
)
def test_an_answer_goes_on_where_it_can_and_begins_again_while_nothing_was_sent(
    facts: dict[str, Any], expected: Move
) -> None:
    assert move(**facts) is expected


@pytest.mark.parametrize(
    "facts",
    [
        {"tries_left": 0},
        {"tries_left": 0, "emitted": 0, "sent": False},
        {"migration": False},
        {"migration": False, "sampling": SEEDED},
        {"error": InvalidRequest("no"), "sent": False},
        {"error": Unsupported("no"), "sent": False},
        {"error": DeadlineExceeded("no"), "sent": False},
        {"error": Cancelled("no"), "sent": False},
        {"error": FrontendFailed("odd"), "sent": False},
        {"error": FrontendStops("bye"), "sent": False},
    ],
)
def test_it_ends_with_the_workers_error_where_another_try_is_not_allowed_or_of_no_use(facts: dict[str, Any]) -> None:
    with pytest.raises(TokenmillError) as raised:
        move(**facts)
    assert raised.value is facts.get("error", LOST)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 7), ("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("repetition_penalty", 1.5)],
)
def test_half_an_answer_that_cannot_be_gone_on_from_ends_with_an_error_that_says_why(field: str, value: float) -> None:
    with pytest.raises(Unavailable, match=f"^the worker was lost; an answer with {field} cannot go on") as raised:
        move(sampling={field: value})
    assert (raised.value.param, raised.value.retry_after_s) == (field, 2)
