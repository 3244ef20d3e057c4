"""Server-sent events to one client, written without a task or an await for each."""

from __future__ import annotations

import asyncio

from controlplane.errors import Cancelled
from services.frontend.http_exchange import Exchange

__all__ = ["EventStream"]

_CONTENT_TYPE = b"text/event-stream; charset=utf-8"


class EventStream:
    """Writes events at once; while the client is slow they gather here. Past a bound the exchange is interrupted."""

    __slots__ = ("_begun", "_exchange", "_limit", "_overflown", "_waiting", "_waiting_bytes", "_written")

    def __init__(self, exchange: Exchange, limit_bytes: int) -> None:
        self._exchange = exchange
        self._limit = limit_bytes
        self._begun = False
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._written = asyncio.Event()
        self._overflown = False
        exchange.connection.on_writable = self._write_waiting

    @property
    def begun(self) -> bool:
        """The response's status and headers are on their way."""
        return self._begun

    def write(self, event: bytes) -> None:
        """One event, or several in one piece. The first begins the response."""
        if self._overflown:
            return
        if not self._waiting and not self._exchange.connection.slow:
            self._send(event)
            return
        self._waiting.append(event)
        self._waiting_bytes += len(event)
        if self._waiting_bytes > self._limit:
            self._overflown = True
            self._exchange.interrupt(
                Cancelled(f"the client left more than {self._limit} bytes of its stream unread, so it was ended")
            )

    async def finish(self, last: bytes, timeout_s: float) -> bool:
        """The last event; False when the client was gone before.

        One that does not read what is left in time loses its connection.
        """
        self._waiting.append(last)
        try:
            async with asyncio.timeout(timeout_s):
                while self._exchange.connection.slow:
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            self._exchange.connection.abort()
            return False
        finally:
            self._exchange.connection.on_writable = None
        if self._exchange.connection.lost:
            return False
        self._begin()
        self._exchange.send_now(b"".join(self._waiting), last=True)
        return True

    def _write_waiting(self) -> None:
        if not self._exchange.connection.slow:
            self._written.set()
            if self._waiting:
                waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
                self._send(b"".join(waiting))

    def _send(self, data: bytes) -> None:
        self._begin()
        self._exchange.send_now(data)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin_now(_CONTENT_TYPE)
