"""Bounds what requests take before their answers are in the making: memory for bodies, threads for long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from controlplane.errors import Overloaded

__all__ = ["Bodies", "HeldBody", "LongWork"]

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_AFTER_S = 1.0
_SHORT = 32_768
"""Bytes or characters that take less than a millisecond or two of the event loop's time."""
_THREADS = 2
_MOST_WAITING = 64


class Bodies:
    """The request bodies in memory, all requests together, from the first byte until their text is tokens."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Room for one body, which it takes as it grows."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            held.release()

    def take(self, more: int) -> None:
        """Raises `Overloaded` where that would be too many."""
        if self._bytes + more > self._most_bytes:
            raise Overloaded(
                f"the request bodies in the making are over {self._most_bytes} bytes together; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._bytes += more

    def give_back(self, count: int) -> None:
        """The opposite."""
        self._bytes -= count


class HeldBody:
    """What one body has taken."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def grow(self, more: int) -> None:
        """More of it came. Raises `Overloaded`."""
        self._bodies.take(more)
        self._bytes += more

    def release(self) -> None:
        """It is not needed any more. May be said twice."""
        self._bodies.give_back(self._bytes)
        self._bytes = 0


class LongWork:
    """Reads and tokenises long texts in a few threads, so that nobody else waits for that.

    A caller that is cancelled takes its work with it, unless it runs: then it ends by itself, which its bounded length
    makes soon.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "long-work")
        self._callers = 0

    async def run(self, length: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Short work is done at once. Raises `Overloaded` where too much long work waits."""
        if length <= _SHORT:
            return work(*args, **kwargs)
        if self._callers >= _THREADS + _MOST_WAITING:
            raise Overloaded(
                f"{self._callers} long prompts are being read already; try again later", retry_after_s=_RETRY_AFTER_S
            )
        self._callers += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(work, *args, **kwargs))
        finally:
            self._callers -= 1
