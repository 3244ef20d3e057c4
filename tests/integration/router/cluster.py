"""A router as its own process, and light workers that publish real events but compute nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.bus import Bus
from controlplane.discovery import Discovery
from controlplane.instances import Instance, ModelCard, State
from controlplane.kv_publisher import KvPublisher, KvSourceServicer
from engines.base import Capability, LoadSnapshot
from kvcache.events import KvEvent, Tier
from kvcache.format import KvFormat
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")
CARD = ModelCard(
    name="model",
    tokenizer="builtin",
    format=FORMAT,
    max_model_len=8192,
    vocab_size=1000,
    total_blocks=1000,
    max_num_seqs=16,
    max_batched_tokens=2048,
    capabilities=tuple(sorted(Capability)),
)


async def until(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool], what: str, within_s: float = 60.0
) -> None:
    """Waits for a condition; fails with `what` did not come true."""
    deadline = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.05)


class KvSource(KvSourceServicer):
    """A worker's own, which can be told to refuse."""

    refusals_left = 0

    async def GetKvSnapshot(  # noqa: N802
        self, request: kv_pb2.GetKvSnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kv_pb2.KvSnapshotPart]:
        async for part in super().GetKvSnapshot(request, context):
            yield part
            if self.refusals_left:
                self.refusals_left -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broke in the middle")


class LightWorker:
    """One worker to the control plane: in discovery, on the bus, with KvSource and load reports."""

    def __init__(self, discovery: Discovery, bus: Bus, deployment: str, instance: Instance) -> None:
        self.discovery = discovery
        self.bus = bus
        self.instance = instance
        self.publisher = KvPublisher(bus, deployment, instance.instance_id, instance.epoch)
        self.kv_source = KvSource(self.publisher)
        self.load = LoadSnapshot()

    @property
    def instance_id(self) -> str:
        return self.instance.instance_id

    def say(self, *events: KvEvent) -> None:
        self.publisher.events(events)
        self.publisher.flush()

    def say_unheard(self, *events: KvEvent) -> None:
        """Numbers events and publishes them to nobody, as a paused connection does."""
        publish, self.bus.publish = self.bus.publish, lambda subject, data: None  # type: ignore[method-assign]
        try:
            self.say(*events)
        finally:
            self.bus.publish = publish  # type: ignore[method-assign]

    async def report_each_second(self) -> None:
        while True:
            self.publisher.load_report(self.load)
            await asyncio.sleep(0.5)

    async def publish(self, **changes: object) -> None:
        self.instance = msgspec.structs.replace(self.instance, **changes)
        await self.discovery.update(self.instance)


class Cluster:
    """Light workers in this process, against real etcd and NATS."""

    def __init__(self, etcd: str, nats: str, deployment: str, stack: AsyncExitStack) -> None:
        self.etcd, self.nats, self.deployment = etcd, nats, deployment
        self._stack = stack
        self.workers: dict[str, LightWorker] = {}

    @asynccontextmanager
    async def running(
        self, instance_id: str, role: str, *, card: ModelCard = CARD, state: State = State.READY
    ) -> AsyncIterator[LightWorker]:
        """A worker for as long as the context lasts; its end is a farewell."""
        async with AsyncExitStack() as stack:
            registry = CollectorRegistry()
            discovery = await Discovery.connect(self.etcd, self.deployment, registry, timeout_s=60)
            stack.push_async_callback(discovery.close)
            bus = await Bus.connect(self.nats, registry)
            stack.push_async_callback(bus.close)
            server = grpc.aio.server()
            instance = Instance(
                service=role,
                instance_id=instance_id,
                state=state,
                epoch=time.time_ns(),
                address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}",
                pid=os.getpid(),
                host="test",
                version="0",
                role=role,
                model=card,
            )
            worker = LightWorker(discovery, bus, self.deployment, instance)
            kv_pb2_grpc.add_KvSourceServicer_to_server(worker.kv_source, server)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            await discovery.register(instance)
            stack.push_async_callback(discovery.deregister)
            reports = asyncio.create_task(worker.report_each_second())
            stack.callback(reports.cancel)
            self.workers[instance_id] = worker
            stack.callback(self.workers.pop, instance_id)
            yield worker

    async def start(
        self, instance_id: str, role: str, *, card: ModelCard = CARD, state: State = State.READY
    ) -> LightWorker:
        """A worker until the test ends."""
        return await self._stack.enter_async_context(self.running(instance_id, role, card=card, state=state))


class RouterProcess:
    """`python -m services.router` and a client of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel, address: str, metrics: str, log: Path
    ) -> None:
        self.process = process
        self.address = address
        self.metrics = metrics
        self.stub = router_pb2_grpc.RouterStub(channel)
        self.log = log

    async def schedule(
        self,
        hashes: Sequence[int] = (),
        *,
        request_id: str = "request",
        tokens: int = 100,
        model: str = "model",
        excluded: Sequence[str] = (),
        explain: bool = False,
    ) -> router_pb2.ScheduleResponse:
        request = router_pb2.ScheduleRequest(
            request_id=request_id,
            model=model,
            block_hashes=hashes,
            prompt_tokens=tokens,
            excluded_instances=excluded,
        )
        metadata = (("tokenmill-explain", "1"),) if explain else ()
        return await self.stub.Schedule(request, timeout=30, metadata=metadata)

    async def index(self) -> dict[str, router_pb2.WorkerBlocks]:
        call = self.stub.GetIndex(router_pb2.GetIndexRequest(), timeout=30)
        return {one.instance_id: one async for one in call}

    async def metric(self, name: str) -> float:
        """Its present value."""
        with await asyncio.to_thread(urlopen, f"http://{self.metrics}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    async def agrees_with(self, cluster: Cluster) -> bool:
        """Whether it has every worker's own picture, block by block."""
        index = await self.index()
        if index.keys() != cluster.workers.keys():
            return False
        for instance_id, worker in cluster.workers.items():
            believed, (epoch, seq, tiers) = index[instance_id], worker.publisher.snapshot()
            if believed.stale or (believed.epoch, believed.seq) != (epoch, seq):
                return False
            if sorted(believed.hashes) != sorted(tiers[Tier.DEVICE]):
                return False
        return True

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


StartRouter = Callable[..., Awaitable[RouterProcess]]
