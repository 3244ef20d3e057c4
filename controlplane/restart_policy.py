"""When a process that ended is started again. Pure."""

from __future__ import annotations

__all__ = ["RestartPolicy"]

_SETTINGS_ARE_WRONG = 2
"""The exit code by which our services say that trying again is of no use."""

_STEADY_S = 30.0
"""A child that lived this long counts as recovered: its next failure is the first in a row."""


class RestartPolicy:
    """How long to wait before a restart, and when to give up. One per child."""

    def __init__(self, *, first_delay_s: float = 0.5, longest_delay_s: float = 30.0, attempts: int = 3) -> None:
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._attempts = attempts
        self._failures_in_a_row = 0
        self._ever_ready = False

    def ready(self) -> None:
        """The child has come to work: from now on it is restarted for ever."""
        self._ever_ready = True

    def delay_after(self, exit_code: int, lived_s: float) -> float | None:
        """Seconds until the restart; None gives up, which only a child that was never ready brings about."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if lived_s < _STEADY_S else 1
        hopeless = exit_code == _SETTINGS_ARE_WRONG or self._failures_in_a_row >= self._attempts
        if hopeless and not self._ever_ready:
            return None
        return float(min(self._longest_delay_s, self._first_delay_s * 2 ** min(self._failures_in_a_row - 1, 16)))
