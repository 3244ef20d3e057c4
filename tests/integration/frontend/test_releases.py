"""KV that is given back to a prefill worker which is hard to reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest

from controlplane.channels import Channels
from services.frontend.releases import Releases
from tests.integration.frontend.peers import ScriptedPrefill, until
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


async def test_kv_is_given_back_when_its_worker_can_be_reached_again_though_its_channel_was_forgotten_meanwhile(
    reserved_port: int,
) -> None:
    channels, address = Channels(), f"127.0.0.1:{reserved_port}"
    releases = Releases(channels)
    running = asyncio.create_task(releases.run())
    await asyncio.sleep(0)
    releases.add(address, prefill_pb2.ReleaseRequest(handle_id="kv-1", epoch=7), "trace")
    await until(lambda: channels.get(address).get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
    channels.tidy(known=())

    prefill, server = ScriptedPrefill(), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
    assert server.add_insecure_port(address)
    await server.start()
    await until(lambda: prefill.released or running.done())
    assert prefill.released == ["kv-1"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    releases.add(address, prefill_pb2.ReleaseRequest(handle_id="kv-2", epoch=7), "trace")  # is no error
    await channels.close()
    await server.stop(0)
