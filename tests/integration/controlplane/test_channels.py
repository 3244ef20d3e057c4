"""Channels to instances that nobody knows any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from controlplane.channels import Channels

Until = Callable[..., Awaitable[float]]


async def test_a_channel_is_kept_while_its_peer_is_connected_and_closed_when_it_is_gone(until: Until) -> None:
    go_on = asyncio.Event()

    async def stream(_request: bytes, context: Any) -> None:
        await context.write(b"first")
        await go_on.wait()
        await context.write(b"second")

    server = grpc.aio.server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.v1.Test", handlers)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = Channels()
    channel = channels.get(address)
    call = channel.unary_stream("/test.v1.Test/Stream")(b"")
    assert await call.read() == b"first"

    await channels.tidy(known=())
    assert channels.get(address) is channel
    go_on.set()
    assert await call.read() == b"second", "an answer outlives what is known of its worker"

    await server.stop(0)
    await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    await channels.tidy(known=(address,))
    assert channels.get(address) is channel, "a known one is back soon"
    async with asyncio.timeout(60):
        while channels.get(address) is channel:
            await channels.tidy(known=())
            await asyncio.sleep(0.01)
    await channels.close()
