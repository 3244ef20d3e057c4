"""A TCP link that can be spoilt: it stands before a server, and its clients know no other way there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from types import TracebackType
from typing import Self

__all__ = ["Address", "Link", "State"]

Address = tuple[str, int]

_CHUNK = 1 << 16
_DELAY_S = 0.1
_SLOW_BYTES_S = 100_000
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send a reset."""


class State(Enum):
    """What the link does. Of several faults at once the last of these wins."""

    OPEN = "carries"
    DELAYED = "carries, each piece 0.1 s late"
    SLOW = "carries 100 kB/s"
    MUTE = "accepts, and carries nothing either way"
    SHUT = "nobody listens; open connections are reset"


_ORDER = list(State)


class Link:
    """Carries bytes from where it listens to a server. Connections live as long as both ends want, or until a reset.

    An async context manager; inside it the link is there.
    """

    def __init__(self, listen: Address, server: Address) -> None:
        self.listens_at = listen
        self._server = server
        self._faults: list[State] = []
        self._state = State.OPEN
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._carriers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._apply()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_listening()
        self.reset()
        for carrier in list(self._carriers):
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)

    @asynccontextmanager
    async def spoilt(self, state: State) -> AsyncIterator[None]:
        """Changes what it does, for open connections too."""
        self._faults.append(state)
        await self._apply()
        try:
            yield
        finally:
            self._faults.remove(state)
            await self._apply()

    async def _apply(self) -> None:
        async with self._changing:
            self._state = max([State.OPEN, *self._faults], key=_ORDER.index)
            self._changed.set()
            self._changed = asyncio.Event()
            if self._state is State.SHUT:
                await self._stop_listening()
                self.reset()
            elif self._listener is None:
                self._listener = await asyncio.start_server(self._accept, *self.listens_at)

    def reset(self) -> None:
        """Breaks every open connection, as a lost machine's successor does."""
        for writer in list(self._open):
            _break(writer)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None
        self._carriers.add(carrier)
        self._open.add(writer)
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server)
            self._open.add(server_writer)
            try:
                async with asyncio.TaskGroup() as both_ways:
                    both_ways.create_task(self._carry(reader, server_writer))
                    both_ways.create_task(self._carry(server_reader, writer))
            except* OSError:
                pass  # one end is gone, and the other is told below
            finally:
                self._open.discard(server_writer)
                _break(server_writer)
        except OSError:
            pass  # nobody is behind the link, which its client sees as a reset
        finally:
            self._open.discard(writer)
            self._carriers.discard(carrier)
            _break(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            while self._state is State.MUTE:
                await self._changed.wait()
            if self._state is State.DELAYED:
                await asyncio.sleep(_DELAY_S)
            elif self._state is State.SLOW:
                await asyncio.sleep(len(data) / _SLOW_BYTES_S)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def _break(writer: asyncio.StreamWriter) -> None:
    transport = writer.transport
    peer: socket.socket | None = transport.get_extra_info("socket")
    if peer is not None and not transport.is_closing():
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()
