"""How long a request would wait here for its first token, and whether that is too long. Pure: the time is passed in."""

from __future__ import annotations

import math
from collections import deque

from controlplane.errors import Overloaded

__all__ = ["Waits"]

_STARTS = 64
_FEWEST = 8
"""Starts that an estimate needs."""


class Waits:
    """Knows at which pace waiting requests have begun lately. While nothing waits it knows nothing and refuses none."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._starts: deque[float] = deque(maxlen=_STARTS)

    def begun(self, now: float, waiting: int) -> None:
        """A request has begun, and so many still wait."""
        if waiting:
            self._starts.append(now)
        else:
            self._starts.clear()

    def expected_s(self, now: float, waiting: int) -> float:
        """For one more request behind those that wait."""
        if len(self._starts) < _FEWEST:
            return 0.0
        return waiting * (now - self._starts[0]) / len(self._starts)

    def check(self, now: float, waiting: int, time_left_s: float | None) -> None:
        """Raises `Overloaded` for a request that would wait longer than anyone may, or than it can."""
        expected = self.expected_s(now, waiting)
        bound = min(self._longest_s, time_left_s or math.inf)
        if expected > bound:
            raise Overloaded(
                f"{waiting} requests wait here, and this one would wait {expected:.1f} s, longer than {bound:.3g} s",
                retry_after_s=max(expected - bound, 1.0),
            )
