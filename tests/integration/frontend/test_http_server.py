"""The HTTP server alone: how long it waits for a client, and how it lets clients go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.frontend.http_server import HttpLimits, HttpServer

PATIENCE_S = 0.5
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(2 * PATIENCE_S)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = HttpServer(app, HttpLimits(max_head_bytes=1024, read_timeout_s=PATIENCE_S, idle_timeout_s=PATIENCE_S))
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


@pytest.mark.parametrize("begins", [b"", HEAD, b"\r\n"])
async def test_a_client_that_does_not_complete_a_head_in_time_is_let_go(port: int, begins: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        writer.write(begins)
        assert await reader.read() == b""


async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def dribble() -> None:
        writer.write(HEAD)
        while True:
            writer.write(b"a")
            await asyncio.sleep(PATIENCE_S / 10)

    dribbling = asyncio.create_task(dribble())
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    dribbling.cancel()


async def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert b"204" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"", "then it is idle"


async def refusal(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of an answer after which the server closes."""
    async with asyncio.timeout(60):
        return (await reader.readuntil(b"\r\n\r\n")), (await reader.read())


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("what", [b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 1100), HEAD + b"x: %b\r\n\r\n" % (b"y" * 1100)])
async def test_a_head_over_the_bound_is_refused_however_it_comes(port: int, what: bytes, pieces: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = -(-len(what) // pieces)
    for start in range(0, len(what), size):
        writer.write(what[start : start + size])
        await writer.drain()
        await asyncio.sleep(0)
    head, body = await refusal(reader)
    assert head.startswith(b"HTTP/1.1 431")
    assert b"over 1024 bytes" in body


async def test_requests_in_one_read_are_not_taken_for_one_long_head(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((HEAD + b"x: %b\r\n\r\n" % (b"y" * 700)) * 2)
    async with asyncio.timeout(60):
        for _ in range(2):
            assert b"204" in await reader.readuntil(b"\r\n\r\n")


async def test_a_connection_too_many_is_told_so_and_closed_and_room_comes_back() -> None:
    server = HttpServer(app, HttpLimits(max_connections=2))
    port = await server.start("127.0.0.1", 0)
    try:
        first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        head, body = await refusal(reader)
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in head
        assert b"2 connections are open" in body
        for _, one in (first, second):
            one.close()
        writer.close()
        async with asyncio.timeout(60):
            while True:  # until the server has seen them go
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(HEAD + b"\r\n")
                answer = await reader.readuntil(b"\r\n\r\n")
                writer.close()
                if b"204" in answer:
                    break
    finally:
        await server.stop()


async def test_a_client_that_never_reads_its_answer_does_not_keep_its_connection() -> None:
    async def much(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (32 << 20)})

    server = HttpServer(much, HttpLimits(idle_timeout_s=PATIENCE_S))
    port = await server.start("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"\r\n")
        async with asyncio.timeout(60):
            while not server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()
    finally:
        await server.stop()


class Answering:
    """An app that answers when it may: at once, and with a stream whose end it holds back."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        if scope["path"] == "/stream":
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"k"})


class Client:
    """One connection that is kept between requests."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def ask(self, path: str = "/") -> None:
        self.writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())

    async def head(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def body(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readexactly(2)

    async def closed(self) -> bool:
        async with asyncio.timeout(60):
            return await self.reader.read() == b""


LINGER_S = 0.5


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with another on the socket"])
async def test_every_client_is_let_go_without_losing_an_answer(shared: bool) -> None:
    app = Answering()
    server = HttpServer(app, HttpLimits(), linger_s=LINGER_S)
    with socket.create_server(("127.0.0.1", 0)) as socket_of_all:
        socket_of_all.setblocking(False)
        port = await server.start("127.0.0.1", 0, inherited=[socket_of_all] if shared else [])
        async with Client(port) as idle, Client(port) as late, Client(port) as waiting, Client(port) as streaming:
            for client in (idle, late):
                client.ask()
                assert b"connection: close" not in await client.head()
                assert await client.body() == b"ok"
            waiting.ask("/slow")
            streaming.ask("/stream")
            assert b"connection: close" not in await streaming.head(), "its answer has begun"
            leaving = asyncio.create_task(server.leave())
            await asyncio.sleep(0)
            late.ask()
            assert b"connection: close" in await late.head()
            assert await late.body() == b"ok"
            assert await late.closed()
            assert await idle.closed(), "nothing came for a while"
            assert not leaving.done()
            app.may_end.set()
            assert b"connection: close" in await waiting.head()
            assert await waiting.body() == b"ok"
            assert await waiting.closed()
            assert await streaming.body() == b"ok"
            streaming.ask()
            assert b"connection: close" in await streaming.head(), "what it asked for at once is answered"
            assert await streaming.body() == b"ok"
            async with asyncio.timeout(60):
                await leaving
    await server.stop()


async def test_one_that_leaves_takes_no_client_from_those_it_shares_the_socket_with() -> None:
    with socket.create_server(("127.0.0.1", 0)) as socket_of_all:
        socket_of_all.setblocking(False)
        old, new = HttpServer(Answering(), HttpLimits()), HttpServer(Answering(), HttpLimits())
        port = await old.start("127.0.0.1", 0, inherited=[socket_of_all])
        await asyncio.wait_for(old.leave(), 60)
        async with Client(port) as client:  # nobody accepts it yet
            client.ask()
            await new.start("127.0.0.1", 0, inherited=[socket_of_all])
            assert b"200" in await client.head()
            assert (old.connections, new.connections) == (0, 1)
        await new.stop()
        await old.stay()
        async with Client(port) as client:
            client.ask()
            assert b"connection: close" not in await client.head()
        await old.stop()
