"""Virtual time: a heap of what happens when. Pure.

Times are whole picoseconds, so that sums of step times do not depend on how they are added up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["PS", "Timeline"]

PS = 10**12
"""Picoseconds in a second."""
_AFTER_STEPS = 1 << 30


class Timeline:
    """Runs actions in the order of their times; of equal times by `order`, then by when they were added.

    Ends of steps have their worker's number for an order, and come before all else: whether a worker's next step was
    known long before or only just now must not decide which of two comes first.
    """

    def __init__(self) -> None:
        self.now_ps = 0
        self._due: list[tuple[int, int, int, Callable[..., object], Any]] = []
        self._added = 0

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return self.now_ps / PS

    def at(self, time_ps: int, action: Callable[..., object], argument: Any, *, order: int = _AFTER_STEPS) -> None:
        """Calls `action(argument)` then."""
        self._added += 1
        heapq.heappush(self._due, (time_ps, order, self._added, action, argument))

    def after(self, delay_s: float, action: Callable[..., object], argument: Any) -> None:
        """Calls `action(argument)` so much later."""
        self.at(self.now_ps + round(delay_s * PS), action, argument)

    def run(self) -> None:
        """Until nothing is left to happen."""
        due = self._due
        pop = heapq.heappop
        while due:
            self.now_ps, _, _, action, argument = pop(due)
            action(argument)
