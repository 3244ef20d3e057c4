"""Decides whether an answer is stuck though its worker lives. Pure.

A worker's pulses, one a second, come in order with its tokens. An answer without a token between so many of them is
stuck: counted so, a stall of this process, of the worker's or of the network in between makes no difference. A pulse
that says that requests wait for room, or that prompts are being computed, counts for nothing: under overload an answer
may well have been put back, and moving it elsewhere would make things worse there. Nor does, once the answer has begun,
one before which the engine made no step: whether an engine is slow or hangs its worker knows better, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Progress", "Pulse"]

_LEAST_PULSES = 3
_TIMES = 5
_FIRST_TOKEN_PULSES = 15
"""Before its first token an answer may wait for KV from elsewhere, which has a deadline of its own."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a worker's engine does."""

    waiting_requests: int
    queued_prefill_tokens: int
    step_time_s: float
    steps: int
    """So far; 0: not told."""


class Progress:
    """Of one answer on one worker."""

    __slots__ = ("_begun_with", "_emitted", "_steps", "_without")

    def __init__(self, emitted: int) -> None:
        """`emitted` tokens came from other workers."""
        self._begun_with = self._emitted = emitted
        self._without = 0
        self._steps = 0

    def is_stuck(self, emitted: int, pulse: Pulse) -> bool:
        """Call at each pulse."""
        stepped = not pulse.steps or pulse.steps != self._steps or emitted == self._begun_with
        self._steps = pulse.steps
        if emitted != self._emitted:
            self._emitted, self._without = emitted, 0
        elif stepped and not pulse.waiting_requests and not pulse.queued_prefill_tokens:
            self._without += 1
        allowed = max(_LEAST_PULSES, math.ceil(_TIMES * pulse.step_time_s))
        if self._emitted == self._begun_with:
            allowed = max(_FIRST_TOKEN_PULSES, allowed)
        return self._without > allowed
