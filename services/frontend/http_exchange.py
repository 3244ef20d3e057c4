"""One HTTP request and its response, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from controlplane.errors import InvalidRequest
from services.frontend.http_server import CONNECTION, Connection
from services.frontend.openai_errors import BodyTooLarge, BodyTooSlow

__all__ = ["ClientGone", "Exchange"]

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
        self.request_id = ""
        self.status = 0
        """Of the response, once it has begun."""
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._body_read = False
        self._complete = False
        self._task: asyncio.Task[Any] | None = None
        self._interruption: Exception | None = None

    def header(self, name: bytes) -> str:
        """Empty when absent; of several with one name, the last."""
        return self._headers.get(name, b"").decode("latin-1")

    async def body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The request's whole body. Raises `BodyTooLarge`, before reading it where its length is announced."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_body(max_bytes)
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not come within {timeout_s:g} s") from None

    async def _read_body(self, max_bytes: int) -> bytes:
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
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
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
        self._complete = True
        await self._send({"type": "http.response.body", "body": body})

    def begin_now(self, content_type: bytes) -> None:
        """Status 200 and headers of a response that streams, without an await; see `send_now`."""
        _run_now(
            self._send(self._start(200, content_type, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]))
        )

    def send_now(self, data: bytes, *, last: bool = False) -> None:
        """A part of the body, without an await. Only while `connection.slow` is false: then nothing has to wait."""
        self._complete = last
        _run_now(self._send({"type": "http.response.body", "body": data, "more_body": not last}))

    async def interruptibly(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, and cancels it when it is interrupted or the client hangs up, which raises `ClientGone`.

        Only once the body was read.
        """
        task = self._task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._until_gone())
        try:
            await work
        except asyncio.CancelledError:
            if self._interruption is not None and not task.uncancel():
                raise self._interruption from None
            raise
        finally:
            self._task = None
            watch.cancel()

    def interrupt(self, error: Exception) -> None:
        """Ends `interruptibly` with this error; the first one counts."""
        if self._interruption is None and self._task is not None:
            self._interruption = error
            self._task.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.interrupt(ClientGone())

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
