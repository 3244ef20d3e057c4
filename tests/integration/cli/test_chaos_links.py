"""A link between a client and a server, spoilt in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cli.chaos.links import Link, State
from controlplane.embedded import free_port

_LONG_S = 30.0
_WELL_S = 0.3
"""For something not to come: a link that carried it would have done so long before."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """Before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Link(("127.0.0.2", free_port()), server.sockets[0].getsockname()) as link:
        yield link
    server.close()


async def _connect(link: Link) -> Streams:
    async with asyncio.timeout(_LONG_S):
        return await asyncio.open_connection(*link.listens_at)


async def _echoed(streams: Streams, data: bytes) -> bytes:
    streams[1].write(data)
    async with asyncio.timeout(_LONG_S):
        return await streams[0].readexactly(len(data))


@pytest.mark.parametrize("state", [State.OPEN, State.DELAYED, State.SLOW])
async def test_what_a_link_carries_arrives_whole(link: Link, state: State) -> None:
    async with link.spoilt(state):
        streams = await _connect(link)
        data = bytes(range(256)) * 64
        assert await _echoed(streams, data) == data
        streams[1].write_eof()
        async with asyncio.timeout(_LONG_S):
            assert await streams[0].read() == b""


async def test_a_mute_link_accepts_and_says_nothing_until_it_is_open_again(link: Link) -> None:
    before = await _connect(link)
    assert await _echoed(before, b"hello") == b"hello"
    async with link.spoilt(State.MUTE):
        during = await _connect(link)
        for streams in (before, during):
            streams[1].write(b"hello")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(streams[0].read(1), _WELL_S)
    for streams in (before, during):
        async with asyncio.timeout(_LONG_S):
            assert await streams[0].readexactly(5) == b"hello"


async def test_a_shut_link_resets_its_connections_and_refuses_new_ones(link: Link) -> None:
    streams = await _connect(link)
    assert await _echoed(streams, b"hello") == b"hello"
    async with link.spoilt(State.SHUT):
        with pytest.raises(ConnectionError):
            await _echoed(streams, b"hello")
        with pytest.raises(ConnectionRefusedError):
            await _connect(link)
    assert await _echoed(await _connect(link), b"again") == b"again"


async def test_of_two_faults_the_worse_one_lasts_as_long_as_it_should(link: Link) -> None:
    async with link.spoilt(State.SHUT):
        async with link.spoilt(State.MUTE):
            with pytest.raises(ConnectionRefusedError):
                await _connect(link)
        with pytest.raises(ConnectionRefusedError):
            await _connect(link)
    await asyncio.gather(*(_spoil_for_a_moment(link) for _ in range(20)))
    assert await _echoed(await _connect(link), b"again") == b"again"


async def _spoil_for_a_moment(link: Link) -> None:
    async with link.spoilt(State.SHUT):
        await asyncio.sleep(0)


async def test_a_reset_breaks_open_connections_and_lets_new_ones_come(link: Link) -> None:
    streams = await _connect(link)
    assert await _echoed(streams, b"hello") == b"hello"
    link.reset()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await _echoed(streams, b"hello")
    assert await _echoed(await _connect(link), b"again") == b"again"


async def test_a_server_that_is_gone_shows_as_a_reset() -> None:
    async with Link(("127.0.0.2", free_port()), ("127.0.0.1", free_port())) as link:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await _echoed(await _connect(link), b"hello")
