"""The engine's time: real, or real at another pace."""

from __future__ import annotations

import asyncio
import math
import time

__all__ = ["PacedClock"]

_RESOLUTION_S = 0.001
"""Event loops' timers are no finer; shorter waits add up until they are worth one."""
_CATCH_UP_S = 0.05
"""How far it may lag behind and still make up for it."""


class PacedClock:
    """Lets a step's time pass, `time_scale` times faster than it says; 0 or infinity: in no time."""

    def __init__(self, time_scale: float) -> None:
        self._speed = 0.0 if math.isinf(time_scale) else time_scale
        self._due = 0.0

    def now(self) -> float:
        """Real seconds; leases are counted in these."""
        return time.monotonic()

    async def let_pass(self, duration_s: float) -> None:
        """Returns when the step is over. Gives way to the event loop in any case."""
        wait = 0.0
        if self._speed:
            now = time.monotonic()
            self._due = max(self._due, now - _CATCH_UP_S) + duration_s / self._speed
            wait = self._due - now
        await asyncio.sleep(wait if wait > _RESOLUTION_S else 0)

    def rest(self) -> None:
        """Nothing was to do until now: there is no lag to catch up with."""
        self._due = time.monotonic()
