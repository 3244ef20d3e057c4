"""Stop strings: the answer ends where one of them is complete, wherever the borders of tokens lie."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """One answer's stop strings. Keeps back only text that may turn out to be the beginning of one.

    The string that is complete first ends the answer (of two that are complete at once: the longer one), so the result
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether the answer ends with it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        border = min(self._first_possible(text, stop) for stop in self._stops)
        self._held = text[border:]
        return text[:border], False

    def finish(self) -> str:
        """What was kept back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _first_possible(text: str, stop: str) -> int:
        """Where the longest end of `text` begins that `stop` begins with; its length when there is none."""
        start = max(len(text) - len(stop) + 1, 0)
        while (start := text.find(stop[0], start)) >= 0:
            if stop.startswith(text[start:]):
                return start
            start += 1
        return len(text)
