from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

Until = Callable[..., Awaitable[float]]


@pytest.fixture
def until() -> Until:
    """`await until(condition, timeout_s)` waits for it to hold and returns the seconds that took."""

    async def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> float:
        started = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  the condition has no event
                await asyncio.sleep(0.005)
        return time.monotonic() - started

    return wait
