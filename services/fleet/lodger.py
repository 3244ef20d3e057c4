"""One light worker of a fleet: its own record, gRPC port and publisher, on what the process has for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from controlplane.bus import Bus
from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.instances import Instance, State
from controlplane.listeners import GrpcListener, host_port
from controlplane.settings import CommonSettings
from engines.base import Engine
from engines.host.worker import Worker

__all__ = ["Lodger"]


class Lodger:
    """A `Berth`. It registers when it is READY: a light worker has no start to tell of."""

    def __init__(
        self,
        worker: Worker,
        settings: CommonSettings,
        instance: Instance,
        discovery: Discovery,
        bus: Bus,
        channels: Channels,
        on_failure: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.instance = instance
        self.discovery = discovery
        self.bus = bus
        self.channels = channels
        self.registry = CollectorRegistry()
        """Not scraped: a process of a hundred workers shows its own metrics only."""
        self._worker = worker
        self._on_failure = on_failure
        self._listener = GrpcListener()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> Engine:
        """Once started."""
        return self._worker.engine

    async def start(self) -> None:
        """Returns when it is READY."""
        names = self._worker.add_to(self._listener.server)
        port = await self._listener.start(self.settings.bind, 0, names)
        address = host_port(self.settings.advertised_host, port)
        self.instance = msgspec.structs.replace(self.instance, address=address)
        card = await self._worker.start(self)
        self.instance = msgspec.structs.replace(self.instance, model=card)
        await self.set_ready(True)

    async def drain(self, timeout_s: float) -> None:
        """Says that it leaves, and finishes what runs."""
        await self._publish(State.DRAINING)
        await self._worker.drain(timeout_s)

    async def resume(self) -> None:
        """The drain was taken back."""
        await self._worker.resume()
        await self.set_ready(True)

    async def stop(self) -> None:
        """Ends what is left."""
        await self._worker.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.stop()

    # For the worker (engines.host.berth.Berth)

    async def progress(self, text: str) -> None:
        """Nobody looks at one of hundreds."""

    async def set_ready(self, able: bool) -> None:
        """See `Berth`."""
        await self._publish(State.READY if able else State.STARTING)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `Berth`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(f"{self.instance.instance_id}: {task.get_name()} broke: {error!r}")

    async def _publish(self, state: State) -> None:
        self.instance = msgspec.structs.replace(self.instance, state=state)
        await self._listener.set_serving(state is State.READY)
        await self.discovery.update(self.instance)
