"""The frontend service: puts the parts together, from start to drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from controlplane.host import Host
from controlplane.instances import ModelCard, State
from controlplane.listen_fds import inherited_sockets
from controlplane.listeners import host_port
from controlplane.telemetry import get_logger
from services.frontend.decode_streams import DecodeStreams
from services.frontend.dispatch import Dispatcher
from services.frontend.front_door import FrontDoor
from services.frontend.http import HttpApi
from services.frontend.http_server import HttpLimits, HttpServer, connections_within_descriptors
from services.frontend.inference import InferenceServicer
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models
from services.frontend.reports import Reports
from services.frontend.settings import FrontendSettings
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["FrontendService"]

_FOLLOWED = (State.READY, State.DRAINING, State.SUSPECT)
"""Workers in these states may have answers of ours."""
_FIRST_MODEL_S = 10.0


class FrontendService:
    """A `controlplane.host.Service`."""

    name = "frontend"

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._inference = InferenceServicer()
        self._host: Host | None = None
        self._door: FrontDoor | None = None
        self._http: HttpServer | None = None
        self._reports: Reports | None = None
        self._unfollow: Callable[[], None] = lambda: None
        self._log = get_logger(__name__)

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds inference.v1; it refuses `Unavailable` until the frontend has started."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)
        return [inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name]

    async def start(self, host: Host) -> ModelCard | None:
        """Listens for HTTP. Models appear as their workers do."""
        self._host = host
        settings, discovery = self._settings, host.discovery
        metrics = FrontendMetrics(host.registry)
        seed = await discovery.deployment_seed()
        streams = DecodeStreams(host.channels, settings.min_flush_ms, metrics)
        reports = self._reports = Reports(host.channels)
        models = Models(discovery, seed, streams.is_open, replacement_wait_s=settings.replacement_wait_s)
        streams.on_change = models.look_again
        dispatcher = Dispatcher(
            settings,
            discovery,
            seed,
            host.channels,
            models,
            streams,
            reports,
            metrics,
            frontend_id=host.instance.instance_id,
        )
        door = self._door = FrontDoor(settings, models, dispatcher, metrics)

        def follow() -> None:
            for one in discovery.instances.values():
                # Connects ahead of the first request, whose 250 ms for the router would be short for that.
                if one.state in _FOLLOWED and one.service != self.name:
                    host.channels.get(one.address).get_state(try_to_connect=True)
            workers = [one for one in discovery.instances.values() if one.role == "decode" and one.state in _FOLLOWED]
            streams.follow(frozenset(one.address for one in workers))

        able = asyncio.Event()

        async def publish_readiness() -> None:
            async for some in models.changes():
                await host.set_ready(some)
                if some:
                    able.set()

        host.spawn(streams.run(), "decode streams")
        host.spawn(reports.run(), "reports to routers")
        host.spawn(dispatcher.maintain(), "KV releases and breakers")
        host.spawn(publish_readiness(), "models")
        self._unfollow = discovery.subscribe(follow)
        follow()

        sockets = inherited_sockets()
        if sockets:
            # Another frontend may be taking the clients, or they wait: none is taken to be told that nobody can serve.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_MODEL_S):
                    await able.wait()
        self._http = HttpServer(HttpApi(door, host.registry), self._http_limits())
        port = await self._http.start(
            host.settings.bind, settings.http_port, host.tls.http if host.tls else None, inherited=sockets
        )
        await host.set_http_address(host_port(host.settings.advertised_host, port))
        self._inference.serve(door)
        self._log.info("listening for HTTP", address=host_port(host.settings.bind, port), tls=host.tls is not None)
        return None

    def _http_limits(self) -> HttpLimits:
        settings = self._settings
        connections = connections_within_descriptors(settings.max_connections)
        if connections < settings.max_connections:
            self._log.warning(
                "fewer connections than max_connections: the limit of open files (ulimit -Hn) is too low",
                connections=connections,
            )
        return HttpLimits(
            max_head_bytes=settings.max_header_kb << 10,
            max_connections=connections,
            read_timeout_s=settings.read_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
        )

    async def drain(self, timeout_s: float) -> None:
        """Sends clients elsewhere and refuses none: those over HTTP one by one, then all that came over gRPC."""
        assert self._host is not None
        assert self._door is not None
        assert self._http is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._door.draining = True
        try:
            async with asyncio.timeout_at(deadline):
                await self._http.leave()
                await self._host.refuse_calls(max(deadline - loop.time(), 0))
                await self._door.empty()
        except TimeoutError:
            self._log.warning("answers are cut off by the end of the drain", answers=self._door.running)

    async def resume(self) -> None:
        """Clients may come again."""
        assert self._door is not None
        assert self._http is not None
        self._door.draining = False
        await self._http.stay()

    def unfinished(self) -> int:
        """Answers in the making."""
        return self._door.running if self._door is not None else 0

    async def stop(self) -> None:
        """Ends every connection, and tells the routers of the last answers."""
        self._unfollow()
        if self._http is not None:
            await self._http.stop()
        if self._reports is not None:
            await self._reports.flush()  # else routers would believe for long that the last answers still run

    def failed(self) -> str | None:
        """A frontend has nothing that breaks by itself."""
        return None
