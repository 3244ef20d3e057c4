"""The HTTP server: uvicorn's protocol on httptools, in the same process and event loop as the gRPC server.

uvicorn's own `Server` would take the signals, which belong to the service host, so its protocol is served directly. The
subclass adds bounds (the request head, its time, open connections, what a client leaves unread), errors as JSON, and a
word when a client that was slow reads again, and an end that cuts nobody off: without loss a server may close a
connection only behind an answer that says so, or when nothing has come for a while.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from controlplane.errors import InvalidRequest, SettingsError, TokenmillError, Unavailable
from controlplane.listen_fds import BACKLOG
from services.frontend.openai_errors import error_body, error_headers

__all__ = ["CONNECTION", "Connection", "HttpLimits", "HttpServer", "connections_within_descriptors"]

CONNECTION = "tokenmill.connection"
"""Key of the `Connection` in an ASGI scope's extensions."""
_CLOSE_TIMEOUT_S = 1.0
_LINGER_S = 2.0
"""A client that is to go elsewhere may bring one more request in this time: it may be on its way already."""
_REFUSED_AT_ONCE = 64
"""Connections beyond the bound that are still told why; more are only closed."""
_OTHER_DESCRIPTORS = 256
"""Kept for everything that is not an HTTP connection: gRPC, etcd, NATS, models' files."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The bounds of one HTTP server; the frontend's settings say what each means to a user."""

    max_head_bytes: int = 32 << 10
    max_connections: int = 4096
    read_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0


class _HeadTooLarge(InvalidRequest):
    http_status = 431


def connections_within_descriptors(wanted: int) -> int:
    """Raises the process's soft limit of open files to the hard one; returns how many connections it has room for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, max(hard - _OTHER_DESCRIPTORS, hard // 2))


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, limits: HttpLimits, on_end: Callable[[], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._on_end = on_end
        self._linger_s: float | None = None
        """The client is to go; how long it may be idle before."""
        self._heads = 0
        """Begun so far."""
        self._between = True
        """Two requests: what comes next is a head's first byte."""
        self._in_head = False
        self._head_bytes = 0
        """Of the head, as far as it is parsed."""
        self._unparsed_bytes = 0
        """Of the head, as far as it came alone: an endless header never reaches a callback."""
        self._deadline: asyncio.TimerHandle | None = None
        """Of the head, or of a refused client to go."""
        self._refusal: TokenmillError | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client is gone."""
        self.on_writable: Callable[[], None] | None = None
        """Called when a client that was slow has read enough to be written to again, or is gone."""

    @property
    def slow(self) -> bool:
        """The client reads slower than it is written to; what is sent now would have to wait."""
        return self.flow.write_paused

    @property
    def lost(self) -> bool:
        """The client is gone."""
        return self.parser is None or self.transport.is_closing()

    def read_on(self) -> None:
        """Lets a hang-up be seen: reading stops while a long body waits to be taken."""
        self.flow.resume_reading()

    def abort(self) -> None:
        """Drops the connection and whatever the client has not read."""
        self.transport.abort()

    def leave(self, linger_s: float) -> None:
        """Ends it behind the next answer that can say so, or when nothing comes for this time."""
        self._linger_s = self.timeout_keep_alive = linger_s  # type: ignore[assignment]  # any number does
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = self.cycle.response_started and self.cycle.keep_alive
        elif self.transport is not None and self._refusal is None:
            self._unset_keepalive_if_required()
            self._stop_timer()
            self._await_head()

    def stay(self) -> None:
        """Takes `leave` back, but for a client that is going already."""
        self._linger_s = None
        self.timeout_keep_alive = self.config.timeout_keep_alive

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client that says nothing is not kept for ever, and one too many is not kept at all."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's is narrower
        open_now = len(self.connections)
        if open_now > self._limits.max_connections + _REFUSED_AT_ONCE:
            self.abort()
        elif open_now > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open, as many as there may be; try again later"
            self._refuse(Unavailable(message, retry_after_s=1.0))
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Lets uvicorn parse it, within bounds."""
        if self._refusal is not None:
            return
        head = self._heads + 1 if self._between else self._heads
        super().data_received(data)
        if self.parser is not None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._in_head and self._heads == head:  # else a part of it is of another request
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._limits.max_head_bytes:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """A new request on this connection."""
        super().on_message_begin()
        self._heads += 1
        self._between, self._in_head = False, True
        self._head_bytes = self._unparsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request's line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header."""
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Makes the request known to the app."""
        self._in_head = False
        self._stop_timer()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours, not ASGI's
        super().on_headers_complete()
        if self._linger_s is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request's body has come."""
        self._between = True
        super().on_message_complete()

    def resume_writing(self) -> None:
        """The transport's buffer is low again."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_timer()
        super().connection_lost(exc)
        self._on_end()
        if self.on_lost is not None:
            self.on_lost()
        if self.on_writable is not None:
            self.on_writable()

    def timeout_keep_alive_handler(self) -> None:
        """The client's time for another head is over. What it has left unread is not kept for it either."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What was received is not HTTP, or a callback refused it."""
        self._refuse(self._head_too_large() if self._head_bytes > self._limits.max_head_bytes else InvalidRequest(msg))

    def _count(self, more: int) -> None:
        self._head_bytes += more
        if self._head_bytes > self._limits.max_head_bytes:
            raise self._head_too_large()  # the parser stops, and `send_400_response` is called

    def _head_too_large(self) -> TokenmillError:
        return _HeadTooLarge(f"the request's line and headers are over {self._limits.max_head_bytes} bytes")

    def _await_head(self) -> None:
        """The next head must be complete in time, counted from its first byte: uvicorn begins anew with each byte."""
        if self._deadline is None and self.timeout_keep_alive_task is None:
            time_s = self._limits.read_timeout_s if self._linger_s is None else self._linger_s
            self._deadline = self.loop.call_later(time_s, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: TokenmillError) -> None:
        """Says why, reads no more, and closes a little later: what is still coming would make the kernel drop this."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        body = error_body(error)
        headers = b"".join(b"%b: %b\r\n" % header for header in error_headers(error))
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n"
        self.transport.write(head % (error.http_status, headers, len(body)) + b"\r\n" + body)
        self._stop_timer()
        self._deadline = self.loop.call_later(_CLOSE_TIMEOUT_S, self.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


class HttpServer:
    """Listens from `start` to `leave` or `stop`."""

    def __init__(self, app: Any, limits: HttpLimits, *, linger_s: float = _LINGER_S) -> None:
        self._config = uvicorn.Config(
            app, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # any number does
            server_header=False, proxy_headers=False,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._limits = limits
        self._linger_s = linger_s
        self._leaving = False
        self._connection_ended = asyncio.Event()
        self._shared = False
        """Others take clients from the same socket."""
        self._listen: Callable[[], Awaitable[asyncio.Server]] | None = None
        self._server: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, inherited: Sequence[socket.socket] = ()
    ) -> int:
        """The port it listens on, that of the socket it `inherited` if any; with `tls` for HTTPS.

        Raises `SettingsError` when it cannot.
        """
        loop = asyncio.get_running_loop()
        self._shared = bool(inherited)

        async def listen() -> asyncio.Server:
            where: dict[str, Any] = {"host": host or None, "port": port, "reuse_address": True}
            if inherited:
                where = {"sock": inherited[0].dup()}
            return await loop.create_server(
                self._connection, **where, backlog=BACKLOG, ssl=tls,
                ssl_handshake_timeout=self._limits.read_timeout_s if tls else None,
                ssl_shutdown_timeout=_CLOSE_TIMEOUT_S if tls else None,
            )  # fmt: skip

        self._listen = listen
        try:
            self._server = await listen()
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, 0 for any",
                param="frontend.http_port",
            ) from error
        bound: socket.socket = self._server.sockets[0]
        port = int(bound.getsockname()[1])  # where it listens again, too
        return port

    async def leave(self) -> None:
        """Returns when the last client has gone, none of them cut off. `stay` takes it back, cancelled or not.

        Who shares the listening socket takes all new clients from now on. Where nobody does they are still taken here
        for a moment: load balancers go by an answer that has just changed.
        """
        assert self._server is not None
        self._leaving = True
        for connection in list(self._state.connections):
            connection.leave(self._linger_s)  # type: ignore[union-attr]  # all are ours
        if not self._shared:
            await asyncio.sleep(self._linger_s)
        self._server.close()
        while self._state.connections:
            self._connection_ended.clear()
            await self._connection_ended.wait()

    async def stay(self) -> None:
        """Takes clients again after a `leave`."""
        assert self._server is not None
        assert self._listen is not None
        self._leaving = False
        for connection in list(self._state.connections):
            connection.stay()  # type: ignore[union-attr]  # all are ours
        if not self._server.is_serving():
            self._server = await self._listen()

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._state.connections)

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
        connection = Connection(self._limits, self._connection_ended.set, self._config, self._state, {})
        if self._leaving:
            connection.leave(self._linger_s)
        return connection
