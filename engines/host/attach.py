"""One Attach stream: when to send what the outbox holds. The hot path of the suite.

Tokens join the next message while a write is pending, and for at most `min_flush_s`; whoever pushes never waits. A
request's first token is sent as soon as no write is pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from controlplane.errors import Unavailable
from engines.base import TokenLogprob
from engines.host.outbox import Outbox, Slot
from tokenmill.decode.v1 import decode_pb2

__all__ = ["HEARTBEAT_S", "AttachStream"]

HEARTBEAT_S = 1.0
"""An idle stream says so this often."""


class AttachStream:
    """The sending side of one frontend's stream. Every method but `run` returns at once."""

    def __init__(self, attach_id: str, *, min_flush_s: float, stalled_write_s: float) -> None:
        self.attach_id = attach_id
        self.outbox = Outbox()
        self._min_flush_s = min_flush_s
        self._stalled_write_s = stalled_write_s
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    def push(
        self,
        slot: Slot,
        token_ids: Sequence[int],
        logprobs: Sequence[Sequence[TokenLogprob]] | None,
        *,
        at_once: bool,
    ) -> int:
        """Adds one step's tokens of one request; returns the bytes it now has unsent."""
        unsent_bytes = self.outbox.add(slot, token_ids, logprobs)
        if at_once:
            self._due.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._min_flush_s, self._flush)
        return unsent_bytes

    def finish(self, slot: Slot, finished: decode_pb2.Finished) -> None:
        """Adds a request's end behind its tokens."""
        self.outbox.finish(slot, finished)
        if self._timer is None:
            self._timer = self._loop.call_later(self._min_flush_s, self._flush)

    def close(self) -> None:
        """Lets `run` return once everything has been sent."""
        self._closing = True
        self._due.set()

    async def run(self, write: Callable[[decode_pb2.StepBatch], Awaitable[None]]) -> None:
        """Sends until closed or cancelled. Raises `Unavailable` when one write takes longer than `stalled_write_s`."""
        try:
            while self.outbox or not self._closing:
                await self._wait()
                batch = self.outbox.take()
                if self.outbox:
                    self._due.set()  # more than one message's worth
                async with asyncio.timeout(self._stalled_write_s):
                    await write(batch)
        except TimeoutError:
            message = f"nothing was read from the Attach stream {self.attach_id} for {self._stalled_write_s:g} s"
            raise Unavailable(message) from None
        finally:
            self._stop_timer()

    async def _wait(self) -> None:
        """Returns when something should be sent: tokens, or a heartbeat."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._due.wait()
        except TimeoutError:
            return
        self._due.clear()
        self._stop_timer()

    def _flush(self) -> None:
        self._timer = None
        self._due.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
