"""Reads the fields of a request one by one; a wrong one is refused by name, with its value and what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import orjson

from controlplane.errors import InvalidRequest, Unsupported

__all__ = ["Fields", "shown"]

_SHOWN_CHARS = 60


class Fields:
    """The fields of one object. One that is absent or null has its default; `refuse_unread` finds the unknown ones."""

    __slots__ = ("_known", "_prefix", "_unread")

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._unread = dict(values)
        self._known: list[str] = []
        self._prefix = prefix

    def take(self, name: str) -> Any:
        """The value as it is, None when absent."""
        self._known.append(name)
        return self._unread.pop(name, None)

    def integer(self, name: str, *, minimum: int, maximum: int) -> int | None:
        """Within bounds, both inclusive."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int:
            self.refuse(name, value, "must be a whole number")
        if not minimum <= value <= maximum:
            self.refuse(name, value, _bounds(value, minimum, maximum))
        return value

    def number(self, name: str, *, minimum: float, maximum: float, above: bool = False) -> float | None:
        """Within bounds; with `above`, the lower one is excluded."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            self.refuse(name, value, "must be a number")
        if not minimum <= value <= maximum or (above and value == minimum):
            self.refuse(
                name,
                value,
                f"must be above {minimum:g} and at most {maximum:g}" if above else _bounds(value, minimum, maximum),
            )
        return float(value)

    def boolean(self, name: str) -> bool:
        """False when absent."""
        value = self.take(name)
        if value is None:
            return False
        if type(value) is not bool:
            self.refuse(name, value, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, not empty."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not str:
            self.refuse(name, value, "must be a string")
        if not value:
            self.refuse(name, value, "must not be empty")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """Empty when absent."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, value, "must be an object")
        return value

    def ignore(self, *names: str) -> None:
        """Known to clients and without a meaning here."""
        for name in names:
            self.take(name)

    def only(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """A feature that is not there: only the values that ask for nothing are taken."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise Unsupported(f"{self._path(name)} {shown(value)} is not supported: {why}", param=self._path(name))

    def refuse(self, name: str, value: Any, why: str) -> NoReturn:
        """Raises `InvalidRequest`."""
        raise InvalidRequest(f"{self._path(name)} is {shown(value)}, and it {why}", param=self._path(name))

    def refuse_unread(self) -> None:
        """Raises `InvalidRequest` for the first field nobody read, with the nearest that is known."""
        for name in self._unread:
            path = _cut(self._path(name))
            nearest = difflib.get_close_matches(name, self._known, n=1)
            hint = f"did you mean {self._path(nearest[0])}?" if nearest else "leave it out"
            raise InvalidRequest(f"Unrecognized request argument supplied: {path}; {hint}", param=path)

    def _path(self, name: str) -> str:
        return f"{self._prefix}{name}"


def shown(value: Any) -> str:
    """A value as its sender wrote it, cut short."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot write it, gRPC can send it
    return _cut(orjson.dumps(value, default=repr).decode())


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _bounds(value: float, minimum: float, maximum: float) -> str:
    if value < minimum and maximum >= 2**31 - 1:
        return f"must be at least {minimum:.15g}"
    return f"must be between {minimum:.15g} and {maximum:.15g}"
