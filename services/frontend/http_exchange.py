"""One HTTP request and its response, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from controlplane.errors import InvalidRequest
from services.frontend.http_server import CONNECTION, Connection
from services.frontend.intake import HeldBody
from services.frontend.openai_errors import BodyTooLarge, BodyTooSlow

__all__ = ["ClientGone", "Exchange"]

T = TypeVar("T")

_SLOWEST_BODY = 16 << 10
"""Bytes a second."""
_SKIPPED_BYTES = 64 << 10
_SKIP_S = 1.0

Headers = Sequence[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client hung up before its response was complete."""


class Exchange:
    """What a handler needs of ASGI. `request_id` is set before any handler runs."""

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]],
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.connection: Connection = scope["extensions"][CONNECTION]
        self.arrived_at = asyncio.get_running_loop().time()
        self.request_id = ""
        self.tenant = ""
        """Whose API key it has."""
        self.status = 0
        """Of the response, once it has begun."""
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._body_read = False
        self._task: asyncio.Task[Any] | None = None
        self._interruption: Exception | None = None

    def header(self, name: bytes) -> str:
        """Empty when absent; of several with one name, the last."""
        return self._headers.get(name, b"").decode("latin-1")

    async def body(self, max_bytes: int, held: HeldBody, *, patience_s: float, deadline: float) -> bytes:
        """The request's whole body. Raises `BodyTooLarge`, before reading it where its length is announced.

        It has `patience_s`, and a second for each 16 KiB that came, but never past `deadline`. Raises `BodyTooSlow`
        then, and `Overloaded` where there is no room to hold it.
        """
        try:
            async with asyncio.timeout_at(min(self.arrived_at + patience_s, deadline)) as timeout:

                def on_piece(length: int) -> None:
                    held.grow(length)
                    until = timeout.when()
                    assert until is not None
                    timeout.reschedule(min(until + length / _SLOWEST_BODY, deadline))

                return await self._read_body(max_bytes, on_piece)
        except TimeoutError:
            waited = asyncio.get_running_loop().time() - self.arrived_at
            raise BodyTooSlow(f"the request body did not come within {waited:.3g} s") from None

    async def skip_body(self) -> None:
        """Reads a short body that nobody wants, so that the connection can go on to the next request."""
        announced = self.header(b"content-length")
        if self._body_read or not announced.isdigit() or int(announced) > _SKIPPED_BYTES:
            return
        with suppress(TimeoutError, InvalidRequest):
            async with asyncio.timeout(_SKIP_S):
                await self._read_body(_SKIPPED_BYTES, lambda _: None)

    async def _read_body(self, max_bytes: int, on_piece: Callable[[int], None]) -> bytes:
        announced = self.header(b"content-length")
        if announced.isdigit() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        if self.header(b"upgrade"):
            # The parser takes what follows such a head for the other protocol, so the body is lost.
            raise InvalidRequest(
                "this server speaks HTTP/1.1 only; send the request without the header Upgrade", param="upgrade"
            )
        encoding = self.header(b"content-encoding")
        if encoding not in ("", "identity"):
            raise InvalidRequest(
                f"content-encoding is {encoding[:40]!r}; send the body as it is", param="content-encoding"
            )
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if len(body) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            on_piece(len(piece))
            body += piece
            if not message.get("more_body"):
                self._body_read = True
                return bytes(body)

    async def reply(
        self, status: int, body: bytes, headers: Headers = (), *, content_type: bytes = b"application/json"
    ) -> None:
        """The whole response."""
        length = (b"content-length", b"%d" % len(body))
        more = [length] if self._body_read or self.method in ("GET", "HEAD") else [length, (b"connection", b"close")]
        await self._send(self._start(status, content_type, [*more, *headers]))
        await self._send({"type": "http.response.body", "body": body})

    def begin_now(self, content_type: bytes) -> None:
        """Status 200 and headers of a response that streams, without an await; see `send_now`."""
        _run_now(
            self._send(self._start(200, content_type, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]))
        )

    def send_now(self, data: bytes, *, last: bool = False) -> None:
        """A part of the body, without an await. Only while `connection.slow` is false: then nothing has to wait."""
        _run_now(self._send({"type": "http.response.body", "body": data, "more_body": not last}))

    async def interruptibly(self, work: Coroutine[Any, Any, T]) -> T:
        """Does the work, and cancels it when it is interrupted or the client hangs up, which raises `ClientGone`.

        Only once the body was read.
        """
        task = self._task = asyncio.current_task()
        assert task is not None
        self.connection.on_lost = lambda: self.interrupt(ClientGone())
        self.connection.read_on()
        if self.connection.lost:
            self.interrupt(ClientGone())
        try:
            return await work
        except asyncio.CancelledError:
            if self._interruption is not None and not task.uncancel():
                raise self._interruption from None
            raise
        finally:
            self._task = None
            self.connection.on_lost = None

    def interrupt(self, error: Exception) -> None:
        """Ends `interruptibly` with this error; the first one counts."""
        if self._interruption is None and self._task is not None:
            self._interruption = error
            self._task.cancel()

    def _start(self, status: int, content_type: bytes, headers: Headers) -> dict[str, Any]:
        self.status = status
        named = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        return {"type": "http.response.start", "status": status, "headers": [*named, *headers]}


def _run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("an ASGI send had to wait although the connection was writable")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is over {max_bytes} bytes; send less, or raise max_body_mb")
