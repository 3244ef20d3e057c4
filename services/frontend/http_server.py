"""The HTTP server: uvicorn's protocol on httptools, in the same process and event loop as the gRPC server.

uvicorn's own `Server` would take the signals, which belong to the service host, so its protocol is served directly. The
subclass adds a bound for the request head, errors as JSON, and a word when a client that was slow reads again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from controlplane.errors import InvalidRequest, SettingsError, TokenmillError
from services.frontend.openai_errors import error_body

__all__ = ["CONNECTION", "Connection", "HttpServer"]

CONNECTION = "tokenmill.connection"
"""Key of the `Connection` in an ASGI scope's extensions."""
_CLOSE_TIMEOUT_S = 1.0


class _HeadTooLarge(InvalidRequest):
    http_status = 431


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, max_head_bytes: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head_bytes = max_head_bytes
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self.on_writable: Callable[[], None] | None = None
        """Called when a client that was slow has read enough to be written to again, or is gone."""

    @property
    def slow(self) -> bool:
        """The client reads slower than it is written to; what is sent now would have to wait."""
        return self.flow.write_paused

    def abort(self) -> None:
        """Drops the connection and whatever the client has not read."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client that says nothing is not kept for ever."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's is narrower
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of an unfinished head, since one endless header never reaches a callback."""
        super().data_received(data)
        if self.parser is not None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._max_head_bytes and not self.transport.is_closing():
            self._refuse(_HeadTooLarge(f"the request's line and headers are over {self._max_head_bytes} bytes"))

    def on_message_begin(self) -> None:
        """A new request on this connection."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Makes the request known to the app."""
        self._in_head = False
        self._stop_awaiting_head()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours, not ASGI's
        super().on_headers_complete()

    def resume_writing(self) -> None:
        """The transport's buffer is low again."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_awaiting_head()
        super().connection_lost(exc)
        if self.on_writable is not None:
            self.on_writable()

    def send_400_response(self, msg: str) -> None:
        """What was received is not HTTP."""
        self._refuse(InvalidRequest(msg))

    def _await_head(self) -> None:
        """The next head must be complete in time, counted from its first byte: uvicorn begins anew with each byte."""
        if self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: TokenmillError) -> None:
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.http_status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer:
    """Listens from `start` to `stop`. A client has `patience_s` for each request's head, and between two requests."""

    def __init__(self, app: Any, *, max_head_bytes: int, patience_s: float = 75) -> None:
        self._config = uvicorn.Config(
            app, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_keep_alive=patience_s,  # type: ignore[arg-type]  # any number does
            server_header=False, proxy_headers=False,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._max_head_bytes = max_head_bytes
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """The port it listens on, with `tls` for HTTPS. Raises `SettingsError` when it cannot."""
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection, host or None, port, reuse_address=True, backlog=2048, ssl=tls
            )
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, 0 for any",
                param="frontend.http_port",
            ) from error
        bound: socket.socket = self._server.sockets[0]
        return int(bound.getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, lets answers under way be written for a moment, then drops every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _connection(self) -> Connection:
        return Connection(self._max_head_bytes, self._config, self._state, {})
