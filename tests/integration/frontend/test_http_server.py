"""The HTTP server alone: how long it waits for a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.frontend.http_server import HttpServer

PATIENCE_S = 0.5
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(2 * PATIENCE_S)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = HttpServer(app, max_head_bytes=1024, patience_s=PATIENCE_S)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


@pytest.mark.parametrize("begins", [b"", HEAD, b"\r\n"])
async def test_a_client_that_does_not_complete_a_head_in_time_is_let_go(port: int, begins: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5 * PATIENCE_S):
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
    async with asyncio.timeout(5 * PATIENCE_S):
        assert await reader.read() == b""
    dribbling.cancel()


async def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(20 * PATIENCE_S):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert b"204" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"", "then it is idle"
