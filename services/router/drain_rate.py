"""How fast a waiting room empties. Pure."""

from __future__ import annotations

__all__ = ["DrainRate"]

HALF_LIFE_S = 10.0
"""Of what is remembered: longer than one burst, shorter than a change of traffic."""
LEAST_PLACED = 4.0
"""With fewer lately nothing is said: one long prompt would decide."""


class DrainRate:
    """Tokens placed a second while somebody waited. What came when nobody did says nothing of how fast it can go."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._count = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def advance(self, now: float, *, waiting: bool) -> None:
        """Time has passed, in which somebody waited or nobody did."""
        passed = now - self._at if self._at is not None else 0.0
        if passed > 0:
            fades = 0.5 ** (passed / HALF_LIFE_S)
            self._tokens *= fades
            self._count *= fades
            self._seconds = self._seconds * fades + (passed if waiting else 0.0)
        self._at = now

    def placed(self, tokens: int) -> None:
        """One that had waited was placed just now."""
        self._tokens += tokens
        self._count += 1

    def seconds_for(self, tokens: int) -> float | None:
        """What so many tokens will take; None: too little was seen."""
        if self._count < LEAST_PLACED or self._seconds <= 0 or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens

    def seconds_each(self) -> float | None:
        """From one placement to the next; None: too little was seen."""
        return self._seconds / self._count if self._count >= LEAST_PLACED and self._seconds > 0 else None
