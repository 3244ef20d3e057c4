"""Channels to instances that nobody knows any more."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from controlplane.channels import Channels

Until = Callable[..., Awaitable[float]]


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


async def test_a_channel_is_kept_while_its_peer_is_connected_and_forgotten_when_it_is_gone(until: Until) -> None:
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

    channels.tidy(known=())
    assert channels.get(address) is channel
    go_on.set()
    assert await call.read() == b"second", "an answer outlives what is known of its worker"

    await server.stop(0)
    await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    channels.tidy(known=(address,))
    assert channels.get(address) is channel, "a known one is back soon"

    def forgotten() -> bool:
        channels.tidy(known=())
        return channels.get(address) is not channel

    await until(forgotten)
    await channels.close()


async def test_who_uses_a_forgotten_channel_can_go_on_using_it(until: Until, reserved_port: int) -> None:
    address = f"127.0.0.1:{reserved_port}"
    channels = Channels()
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await stub.Check(health_pb2.HealthCheckRequest())
    forgotten = weakref.ref(channels.get(address))
    channels.tidy(known=())
    assert channels.get(address) is not forgotten(), "who comes now begins anew"
    channels.tidy(known=())

    waiting = asyncio.ensure_future(stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60))
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    assert server.add_insecure_port(address)
    await server.start()
    assert (await waiting).status is health_pb2.HealthCheckResponse.SERVING

    del stub, waiting
    await until(lambda: gc.collect() >= 0 and forgotten() is None)
    await server.stop(0)
    await channels.close()
