"""The worker host: one engine, served over gRPC in one role, as a `controlplane.host.Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

import engines
from controlplane.channels import Channels
from controlplane.errors import Unavailable
from controlplane.instances import ModelCard
from controlplane.kv_publisher import KvPublisher, KvSourceServicer
from controlplane.telemetry import get_logger
from engines.base import Engine, EngineInfo, Handle, Role
from engines.host.berth import Berth
from engines.host.canary import Canary
from engines.host.load import LoadCollector
from engines.host.stall import READING_S, StallWatch
from engines.host.started import StartedEngine
from engines.settings import EngineSettings
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc

__all__ = ["RoleService", "Worker"]

_LOAD_REPORT_S = 1.0
_RELEASE_TIMEOUT_S = 2.0


class RoleService(Protocol):
    """What a role adds: `PrefillService` or `DecodeService`."""

    def add_to(self, server: grpc.aio.Server) -> str:
        """Adds its servicer; returns its full name."""

    def serve(self, started: StartedEngine) -> None:
        """Takes calls from now on."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work and waits for what runs."""

    def resume(self) -> None:
        """Takes new work again after a `drain`."""

    def unfinished(self) -> int:
        """How much a drain waits for."""

    @property
    def busy(self) -> int:
        """Requests that the engine should be working on."""

    def halt(self, reason: str) -> None:
        """Fails what runs with `Stalled` and refuses what comes, until `go_on`."""

    def go_on(self) -> None:
        """Takes work again after a `halt`."""

    def close(self) -> None:
        """Lets open streams end."""


class Worker:
    """Owns the engine, its KV publisher and the service of its role."""

    def __init__(
        self,
        role: Role,
        settings: EngineSettings,
        service: RoleService,
        *,
        stall_timeout_s: float,
        canary_idle_s: float,
    ) -> None:
        """Raises `SettingsError`, so that a wrong setting ends the process before it waits for anything."""
        engines.check(settings)
        self.name = role.value
        self._role = role
        self._settings = settings
        self._service = service
        self._kv_source = _KvSource()
        self._stall_timeout_s = stall_timeout_s
        self._canary_idle_s = canary_idle_s
        self._shown_load = LoadCollector()
        self._log = get_logger(__name__)
        self._engine: Engine | None = None
        self._publisher: KvPublisher | None = None
        self._hung = ""
        """Why the engine is not waited for any longer."""

    @property
    def engine(self) -> Engine:
        """Once started."""
        assert self._engine is not None
        return self._engine

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the role's service and KvSource; both refuse `Unavailable` until the engine has started."""
        kv_pb2_grpc.add_KvSourceServicer_to_server(self._kv_source, server)
        return [self._service.add_to(server), kv_pb2.DESCRIPTOR.services_by_name["KvSource"].full_name]

    async def start(self, host: Berth) -> ModelCard:
        """Loads the model; from then on KV events and load reports are published and calls taken."""
        instance = host.instance
        publisher = KvPublisher(host.bus, host.settings.deployment, instance.instance_id, instance.epoch)
        self._publisher = publisher
        seed = await host.discovery.deployment_seed()
        advertise = host.settings.advertised_host
        engine = engines.create(self._settings, self._role, instance.instance_id, seed, advertise)
        self._engine = engine

        def on_progress(text: str) -> None:
            host.spawn(host.progress(text), "engine progress")

        info = await engine.start(publisher.events, on_progress)
        host.registry.register(self._shown_load)

        def release(handle: Handle) -> None:
            host.spawn(self._release(host.channels, handle), "release KV")

        self._kv_source.serve(KvSourceServicer(publisher))
        self._service.serve(
            StartedEngine(
                engine=engine,
                info=info,
                instance_id=instance.instance_id,
                epoch=instance.epoch,
                address=instance.address,
                registry=host.registry,
                release=release,
            )
        )
        host.spawn(self._report_load(engine, publisher), "load reports")
        watch = StallWatch(info.max_batched_tokens, info.format.block_size, info.least_stall_s)
        host.spawn(self._watch(host, engine, watch), "stall watch")
        return _model_card(info)

    async def drain(self, timeout_s: float) -> None:
        """Finishes what runs."""
        await self._service.drain(timeout_s)

    async def resume(self) -> None:
        """Takes new work again."""
        self._service.resume()

    def unfinished(self) -> int:
        """Answers, or prompts and held KV."""
        return self._service.unfinished()

    async def stop(self) -> None:
        """Ends streams, engine and publisher."""
        self._service.close()
        if self._engine is not None:
            await self._engine.stop()
        if self._publisher is not None:
            self._publisher.close()

    def failed(self) -> str | None:
        """Why this worker can no longer serve."""
        return self._hung or (self._engine.failed() if self._engine is not None else None)

    async def _report_load(self, engine: Engine, publisher: KvPublisher) -> None:
        while True:
            load = engine.load()
            self._shown_load.latest = load
            publisher.load_report(load)
            await asyncio.sleep(_LOAD_REPORT_S)

    async def _watch(self, host: Berth, engine: Engine, watch: StallWatch) -> None:
        """Takes no work while the engine makes no steps; after long it is given up."""
        canary = Canary(engine, self._canary_idle_s)
        try:
            while True:
                busy = self._service.busy
                was_stalled = watch.stalled
                watch.observe(engine.load(), busy + canary.under_way)
                canary.observe(busy, now=watch.stalled)
                if watch.stalled and not was_stalled:
                    reason = f"the engine has requests and has made no step for {watch.still_s:g} s"
                    self._log.error("the engine is stalled: what it had is given up", requests=busy, reason=reason)
                    self._service.halt(reason)
                    await host.set_ready(False)
                elif was_stalled and not watch.stalled:
                    self._log.warning("the engine makes steps again")
                    self._service.go_on()
                    await host.set_ready(True)
                if watch.still_s > self._stall_timeout_s:
                    self._hung = f"the engine has requests and has made no step for {self._stall_timeout_s:g} s"
                await asyncio.sleep(READING_S)
        finally:
            await canary.close()

    async def _release(self, channels: Channels, handle: Handle) -> None:
        request = prefill_pb2.ReleaseRequest(handle_id=handle.handle_id, epoch=handle.epoch)
        stub = prefill_pb2_grpc.PrefillStub(channels.get(handle.address))
        try:
            await stub.Release(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # Its lease ends by itself.
            self._log.info("KV not released", prefill=handle.instance_id, code=error.code().name)


class _KvSource(kv_pb2_grpc.KvSourceServicer):
    """Registered before there is anything to tell."""

    def __init__(self) -> None:
        self._source: KvSourceServicer | None = None

    def serve(self, source: KvSourceServicer) -> None:
        self._source = source

    async def GetKvSnapshot(  # noqa: N802
        self, request: kv_pb2.GetKvSnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kv_pb2.KvSnapshotPart]:
        if self._source is None:
            raise Unavailable("this worker is still loading its model: try again")
        async for part in self._source.GetKvSnapshot(request, context):
            yield part


def _model_card(info: EngineInfo) -> ModelCard:
    return ModelCard(
        name=info.model,
        tokenizer=info.tokenizer,
        format=info.format,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        total_blocks=info.total_blocks,
        max_num_seqs=info.max_num_seqs,
        max_batched_tokens=info.max_batched_tokens,
        eos_token_ids=info.eos_token_ids,
        capabilities=tuple(sorted(info.capabilities)),
    )
