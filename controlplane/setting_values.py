"""The types a setting may have, each readable from a text (environment, flags) and from TOML.

str  int  float  bool       as one expects; floats are finite
tuple[str, ...]             "a,b" or a TOML array
dict[str, str]              "a=1,b=2" or a TOML table
T | None                    an empty text is None
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

__all__ = ["as_text", "convert"]


def convert(kind: Any, value: Any) -> Any:
    """`value` as a `kind`. Raises `ValueError` saying what it must be; the message does not quote the value."""
    if get_origin(kind) in (Union, types.UnionType):
        if value == "" or value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    reader, words = _READERS[get_origin(kind) or kind]
    try:
        return reader(value)
    except (LookupError, ValueError, TypeError, AttributeError):
        raise ValueError(f"must be {words}") from None


def as_text(value: Any) -> str:
    """The text that reads back as this value."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(value)
        case dict():
            return ",".join(f"{key}={text}" for key, text in value.items())
        case _:
            return str(value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]


def _int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _tuple(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(text for part in parts if (text := _str(part).strip()))


def _dict(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = dict(part.split("=", 1) for part in value.split(",") if part)
    return {key.strip(): _str(text).strip() for key, text in value.items()}


_READERS: dict[type, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (_int, "a whole number"),
    float: (_float, "a number"),
    str: (_str, "a text"),
    tuple: (_tuple, 'a list, as text "a,b"'),
    dict: (_dict, 'a table, as text "key=value,key=value"'),
}
