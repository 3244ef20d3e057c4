"""What the tests of both roles share: waiting, and reading an Attach stream as a frontend does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.decode.v1 import decode_pb2


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for a condition, a coroutine function maybe, and fails the test when it does not come."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.002)


@dataclass
class Frontend:
    """Reads one Attach stream as a frontend does."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, decode_pb2.Finished] = field(default_factory=dict)
    batches: list[decode_pb2.StepBatch] = field(default_factory=list)

    async def read(self, call: Any) -> None:
        async for batch in call:
            self.batches.append(batch)
            start = 0
            for slot, count in zip(batch.slots, batch.counts, strict=True):
                self.tokens.setdefault(slot, []).extend(batch.token_ids[start : start + count])
                start += count
            for finished in batch.finished:
                self.finished[finished.slot] = finished
