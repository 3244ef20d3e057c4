"""Decides from readings of an engine's load whether it has stopped moving. Pure.

It counts readings, not time: a machine that stood still for a minute has made no readings either, and its engine is not
to blame. A step may take five times what it should, and in any case the engine's `least_stall_s`. What it should take
is the mean of the recent ones, and for each prompt token that it may hold, what a prompt token has taken here before.
"""

from __future__ import annotations

from engines.base import LoadSnapshot

__all__ = ["READING_S", "StallWatch"]

READING_S = 0.25
"""Pace of the readings."""
_TIMES = 5
_SLOW_PACE_S = 0.002
"""Time a prompt token takes until it has been measured: that of a small model on two CPU cores."""
_MEASURED_TOKENS = 256
"""Fewer, computed between two readings, say little of the pace."""


class StallWatch:
    """Stalled: the engine has work that needs steps, has made none for too long, and none since."""

    def __init__(self, max_batched_tokens: int, block_size: int, least_s: float) -> None:
        self._least_s = least_s
        self._max_batched_tokens = max_batched_tokens
        self._block_size = block_size
        self._steps = -1
        self._still = 0
        """Readings in a row without a step."""
        self._step_time_s = 0.0
        self._pace_s = _SLOW_PACE_S
        self._queued = 0
        """Prompt tokens to compute when the last step ended."""
        self._in_step = 0
        """The most of them that the present step can hold."""
        self.stalled = False

    @property
    def still_s(self) -> float:
        """Time without a step, with work to do."""
        return self._still * READING_S

    @property
    def allowance_s(self) -> float:
        """Time that the present step may take."""
        return max(self._least_s, _TIMES * (self._step_time_s + self._in_step * self._pace_s))

    def observe(self, load: LoadSnapshot, busy: int) -> None:
        """Call each `READING_S`. `busy` requests have been given to the engine and are not known to wait for others."""
        if load.steps != self._steps:
            if 0 <= self._steps < load.steps:
                self._learn(self._queued - load.queued_prefill_tokens)
            self._begin(load)
            self.stalled = False
            return
        if not self.stalled and (not busy or self._waits_for_readers(load)):
            self._begin(load)
            return
        self._still += 1
        if self._still <= 2:  # later arrivals are not in this step
            self._in_step = max(self._in_step, self._bounded(load))
        # Before the first step nothing is known of how long one takes: the engine may be compiling.
        self.stalled = self.stalled or (load.step_time_s > 0 and self.still_s > self.allowance_s)

    def _begin(self, load: LoadSnapshot) -> None:
        self._steps = load.steps
        self._step_time_s = load.step_time_s
        self._queued = load.queued_prefill_tokens
        self._in_step = self._bounded(load)
        self._still = 0

    def _waits_for_readers(self, load: LoadSnapshot) -> bool:
        """Nothing runs, and blocks held for others may be why nothing can."""
        free_tokens = (load.kv_total_blocks - load.kv_used_blocks) * self._block_size
        return bool(load.kv_leases) and not load.running_requests and load.queued_prefill_tokens > free_tokens

    def _bounded(self, load: LoadSnapshot) -> int:
        return min(load.queued_prefill_tokens, self._max_batched_tokens)

    def _learn(self, computed: int) -> None:
        """Slower is believed at once, faster step by step."""
        if computed >= _MEASURED_TOKENS and not self.stalled:
            measured = (self._still + 1) * READING_S / computed
            self._pace_s = max(measured, self._pace_s + (measured - self._pace_s) / 4)
