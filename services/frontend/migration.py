"""Decides what becomes of an answer whose worker failed it: it goes on elsewhere, begins again elsewhere, or ends.

    went on      it has tokens, and prompt + tokens are all that another worker must know to go on exactly
    began again  it has none, or they cannot be gone on from, and the client has seen nothing of it
    ended        the rest

What a worker knows beyond the tokens is lost with it: where a seed's random numbers had come to, and which tokens were
the answer's own (penalties count those). Without a seed any continuation is as right a sample as the lost one.
max_tokens and min_tokens are counts from the answer's beginning: less what has come, they stay exact.
"""

from __future__ import annotations

from enum import Enum

from controlplane.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, TokenmillError, Unavailable
from engines.base import SamplingParams

__all__ = ["FrontendFailed", "FrontendStops", "Move", "next_move"]


class FrontendFailed(EngineFailed):
    """A mistake of this frontend's own. What it knows of the answer cannot be relied on any more."""


class FrontendStops(Unavailable):
    """This frontend reaches no worker any more; another one does."""


_FINAL = (InvalidRequest, DeadlineExceeded, Cancelled, FrontendFailed, FrontendStops)
"""Another worker would say the same, or nobody waits for the answer any more."""


class Move(Enum):
    """How an answer gets to another worker."""

    RESUME = "goes on"
    RESTART = "begins again"


def next_move(
    error: TokenmillError, sampling: SamplingParams, *, tries_left: int, emitted: int, sent: bool, migration: bool
) -> Move:
    """After `emitted` tokens, some of which the client may have been `sent`. Raises the error that ends the answer."""
    if tries_left <= 0 or isinstance(error, _FINAL):
        raise error
    obstacle = _obstacle(sampling)
    if emitted and migration and not obstacle:
        return Move.RESUME
    if not sent:
        return Move.RESTART
    if not migration:
        raise error
    raise type(error)(
        f"{error.message}; an answer with {obstacle} cannot go on exactly on another worker, so it ends here",
        param=obstacle,
        retry_after_s=error.retry_after_s,
    )


def _obstacle(sampling: SamplingParams) -> str:
    """The field that makes an answer depend on more than the tokens before; empty: none does."""
    if sampling.seed is not None and sampling.temperature > 0:
        return "seed"
    if sampling.presence_penalty != 0:
        return "presence_penalty"
    if sampling.frequency_penalty != 0:
        return "frequency_penalty"
    return "repetition_penalty" if sampling.repetition_penalty != 1 else ""
