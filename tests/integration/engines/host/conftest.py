"""Role services on real gRPC servers, over an engine that the test drives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.channels import MESSAGE_OPTIONS, Channels
from controlplane.grpc_errors import ErrorInterceptor
from engines.base import Handle
from engines.host.decode_service import DecodeService
from engines.host.live import DecodeLimits
from engines.host.prefill_service import PrefillLimits, PrefillService
from engines.host.started import StartedEngine
from tests.scripted_engine import ScriptedEngine
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc
from tokenmill.prefill.v1 import prefill_pb2_grpc

from .peers import Frontend, until
from .worker_process import discovery, start_worker

__all__ = ["EPOCH", "Frontend", "Worker", "discovery", "start_worker", "until"]

EPOCH = 7


@dataclass
class Worker:
    """One role's service, its engine and how to call it."""

    engine: ScriptedEngine
    service: Any
    address: str
    stub: Any
    registry: CollectorRegistry
    released: list[Handle]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @asynccontextmanager
    async def attached(self, attach_id: str = "frontend-1", **fields: Any) -> AsyncIterator[Frontend]:
        """An open stream that is read all the time."""
        frontend = Frontend()
        call = self.stub.Attach(decode_pb2.AttachRequest(attach_id=attach_id, **fields))
        await call.initial_metadata()
        reader = asyncio.create_task(frontend.read(call))
        try:
            yield frontend
        finally:
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def submit(self, request_id: str = "r1", slot: int = 0, **fields: Any) -> None:
        """A request that is good but for what the test says."""
        fields = {"model": "scripted", "attach_id": "frontend-1", "prompt_token_ids": [1, 2, 3]} | fields
        await self.stub.Submit(decode_pb2.SubmitRequest(request_id=request_id, slot=slot, **fields), timeout=60)


Serve = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(service, add_to_server, stub class, engine)`: starts a service; ended with the test."""
    servers: list[grpc.aio.Server] = []
    channels = Channels()

    async def start(service: Any, stub: Any, engine: ScriptedEngine) -> Worker:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=MESSAGE_OPTIONS)
        service.add_to(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        registry = CollectorRegistry()
        released: list[Handle] = []
        info = await engine.start(lambda _: None, lambda _: None)
        service.serve(StartedEngine(engine, info, "worker-1", EPOCH, address, registry, released.append))
        return Worker(engine, service, address, stub(channels.get(address)), registry, released)

    try:
        yield start
    finally:
        await channels.close()
        for server in servers:
            await server.stop(0)


@pytest.fixture
def serve_decode(serve: Serve) -> Callable[..., Awaitable[Worker]]:
    """`await serve_decode(engine, limit=...)`."""

    async def start(engine: ScriptedEngine | None = None, **limits: Any) -> Worker:
        service = DecodeService(DecodeLimits(**limits))
        return await serve(service, decode_pb2_grpc.DecodeStub, engine or ScriptedEngine())

    return start


@pytest.fixture
async def decode(serve_decode: Callable[..., Awaitable[Worker]]) -> Worker:
    """A decode worker with the default limits."""
    return await serve_decode()


@pytest.fixture
async def prefill(serve: Serve) -> Worker:
    """A prefill worker."""
    return await serve(PrefillService(PrefillLimits(max_waiting=2)), prefill_pb2_grpc.PrefillStub, ScriptedEngine())
