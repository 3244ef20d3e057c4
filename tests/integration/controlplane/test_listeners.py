"""What every service's gRPC server bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.listeners import GrpcListener


async def test_more_calls_than_there_may_be_are_refused_and_calls_that_end_make_room() -> None:
    listener = GrpcListener(max_calls=2)
    port = await listener.start("127.0.0.1", 0, [])
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
            stub = health_pb2_grpc.HealthStub(channel)
            watches: list[Any] = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
            for watch in watches:
                await watch.read()
            assert await status_of(stub) is grpc.StatusCode.RESOURCE_EXHAUSTED
            watches[0].cancel()
            while await status_of(stub) is not grpc.StatusCode.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await listener.stop(0)


async def status_of(stub: health_pb2_grpc.HealthStub) -> grpc.StatusCode:
    try:
        await stub.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
