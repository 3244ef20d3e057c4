"""Runs one service as a process: start, ready, drain, stop, in the same way for all.

    run(service, settings)
      listen       gRPC (health and reflection too) and metrics; the addresses are known from here on
      connect      etcd (waits for it, for ever) and NATS (does not wait)
      STARTING     published while the service starts, with its progress
      READY        until SIGTERM, SIGINT or `Control.Drain`, or until something fails
      DRAINING     published first; routers confirm it; then the service finishes what runs, within `drain_timeout_s`
      farewell     others forget this instance at once

A failure is published as FAILED, with its reason, and ends the process with code 1 (2 where the settings are at fault).
A drain that `Control.Drain` asked for may be taken back until it is done, and leads to READY again; a signal's may not,
for what sends one kills soon after. A second signal cuts a drain short (130), a third ends the process on the spot.
SIGQUIT is for those who do not: it drains for as long as what runs may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import grpc
import msgspec
import uvloop
from prometheus_client import Gauge

from controlplane.bus import Bus
from controlplane.channels import Channels
from controlplane.control import ControlServicer
from controlplane.discovery import Discovery
from controlplane.drain import Drain, routers_confirm
from controlplane.epochs import new_epoch
from controlplane.errors import EngineFailed, SettingsError, TokenmillError
from controlplane.instances import Instance, ModelCard, State
from controlplane.listeners import MAX_CALLS, GrpcListener, MetricsListener, host_port
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging, get_logger, new_registry
from controlplane.tls import ServerTls

__all__ = ["Host", "Service", "run"]

_OK, _FAILED, _BAD_SETTINGS, _FORCED = 0, 1, 2, 130

_POLL_S = 1.0
_STOP_S, _FORCED_STOP_S = 15.0, 3.0
_PATIENT_S = 24 * 3600.0
_TIDY_S = 30.0
"""How often channels to those who are gone are looked for."""

T = TypeVar("T")


class Service(Protocol):
    """What a service is to its host.

    `add_to`, `start`, `drain` and `stop` are called in this order, once, but for a drain that is taken back or given
    another time; `failed` each second once it has started.
    """

    name: str
    """"frontend", "router", "prefill" or "decode"."""

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds its servicers; returns their full names, for health and reflection. Calls may come before `start`."""

    async def start(self, host: Host) -> ModelCard | None:
        """Makes it able to serve, however long that takes, and returns the model card of a worker."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work and waits for what runs, which it ends when the time is over.

        Skipped where `start` was not finished. May be cancelled and called again, with another time.
        """

    async def resume(self) -> None:
        """Takes new work again: the drain, which was cancelled or is just done, was taken back."""

    def unfinished(self) -> int:
        """How much a drain would wait for: answers, prompts, held KV."""

    async def stop(self) -> None:
        """Ends what is left. Called in any case, after a start that failed or never came too."""

    def failed(self) -> str | None:
        """Why it can no longer serve, or None."""


def run(service: Service, common: CommonSettings, tls: ServerTls | None = None, *, max_calls: int = MAX_CALLS) -> int:
    """Runs a service until it is told to stop; returns the process's exit code.

    With `tls`, its servers speak TLS. `max_calls`: over gRPC, open at once.
    """
    if not common.instance_id:
        common = replace(common, instance_id=f"{service.name}-{secrets.token_hex(4)}")
    configure_logging(common, service=service.name)

    async def serve() -> int:
        return await Host(service, common, tls, max_calls).serve()

    try:
        return uvloop.run(serve())
    except asyncio.CancelledError:
        return _FORCED


class Host:
    """What a running service is given: its place in the deployment, and what it shares with all others."""

    discovery: Discovery
    bus: Bus
    instance: Instance

    def __init__(
        self, service: Service, settings: CommonSettings, tls: ServerTls | None = None, max_calls: int = MAX_CALLS
    ) -> None:
        self.settings = settings
        self.tls = tls
        self.channels = Channels()
        self.registry = new_registry(service=service.name, instance_id=settings.instance_id)
        loop = asyncio.get_running_loop()
        tasks = Gauge("tokenmill_asyncio_tasks", "Tasks of the event loop", registry=self.registry)
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        self.log = get_logger(f"services.{service.name}")
        self._service = service
        self._listener = GrpcListener(share_port=settings.share_ports, max_calls=max_calls)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = contextlib.AsyncExitStack()
        self._drain = Drain()
        self._signalled = False
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._registered = False
        self._started = False
        self._able = True

    # For the service.

    async def progress(self, text: str) -> None:
        """Publishes what a start is doing, for people: "loading weights"."""
        if not self._started:
            self.log.info(text)
            await self._publish(progress=text)

    async def set_ready(self, able: bool) -> None:
        """Whether the service, once started, can do its work now. It can, until it says otherwise."""
        self._able = able
        if self._started and self.instance.state in (State.STARTING, State.READY):
            await self._publish(state=State.READY if able else State.STARTING)

    async def set_http_address(self, address: str) -> None:
        """Publishes where the service's HTTP server is reached."""
        await self._publish(http_address=address)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` beside the service and ends it with the service. An exception in it fails the service."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)
        return task

    async def refuse_calls(self, timeout_s: float) -> None:
        """Sends callers elsewhere and waits for the calls that run. A drain cannot be taken back from then on."""
        self._drain.final = True
        await self._listener.stop(timeout_s)

    # The life of the process.

    async def serve(self) -> int:
        """Runs the service to its end; returns the exit code."""
        this = asyncio.current_task()
        assert this is not None
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, this)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._on_quit)
        code, reason = _OK, ""
        try:
            await self._live()
        except asyncio.CancelledError:
            code = _FORCED
            self.log.warning("forced to stop")
        except Exception as error:
            code = _BAD_SETTINGS if isinstance(error, SettingsError) else _FAILED
            reason = await self._fail(error)
        await self._stop(code, reason)
        return code

    async def _live(self) -> None:
        """Starts, serves and drains. Returns when all is done, raises on a failure."""
        life = asyncio.create_task(self._start_and_watch(), name="life")
        try:
            while True:
                await self._unless_failed(life, self._drain.asked.wait())
                if not self._started or await self._unless_failed(life, self._drained()):
                    return
        finally:
            self._drain.final = True
            self._drain.begun.set()
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    async def _unless_failed(self, life: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to; raises when the service fails before."""
        task = asyncio.create_task(work, name="until asked, or drained")
        try:
            ends: tuple[asyncio.Future[Any], ...] = (task, life, self._failure)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise EngineFailed(self._failure.result())
            if life.done():
                life.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _start_and_watch(self) -> None:
        await self._listen()
        await self._connect()
        model = await self._service.start(self)
        self._started = True
        await self._publish(state=State.READY if self._able else State.STARTING, model=model, progress="")
        while True:
            if reason := self._service.failed() or self.discovery.failed():
                raise SettingsError(reason) if self.discovery.superseded else EngineFailed(reason)
            await asyncio.sleep(_POLL_S)

    async def _listen(self) -> None:
        settings, host = self.settings, self.settings.advertised_host
        control = ControlServicer(
            self._drain,
            settings.instance_id,
            timeout_s=settings.drain_timeout_s,
            state=lambda: self.instance.state,
            unfinished=self._service.unfinished,
        )
        names = [*self._service.add_to(self._listener.server), control.add_to(self._listener.server)]
        grpc_port = await self._listener.start(
            settings.bind, settings.grpc_port, names, self.tls.grpc if self.tls else None
        )
        self._closing.push_async_callback(self._listener.stop)
        metrics = MetricsListener(settings.bind, settings.metrics_port, self.registry, share_port=settings.share_ports)
        self._closing.push_async_callback(metrics.stop)
        self.instance = Instance(
            service=self._service.name,
            instance_id=settings.instance_id,
            state=State.STARTING,
            epoch=0,  # none yet: it comes from etcd
            address=host_port(host, grpc_port),
            pid=os.getpid(),
            host=socket.gethostname(),
            version=version("tokenmill"),
            role=self._service.name if self._service.name in ("prefill", "decode") else "",
            metrics_address=host_port(host, metrics.port),
            tls=self.tls is not None,
            labels=settings.labels,
        )
        self.log.info("listening", grpc=self.instance.address, metrics=self.instance.metrics_address)

    async def _connect(self) -> None:
        settings = self.settings
        self._closing.push_async_callback(self.channels.close)
        self.discovery = await Discovery.connect(settings.etcd, settings.deployment, self.registry)
        self._closing.push_async_callback(self.discovery.close)
        self.spawn(self._tidy_channels(), "tidy channels")
        self.bus = await Bus.connect(settings.nats, self.registry)
        self._closing.push_async_callback(self.bus.close)
        epoch = await new_epoch(settings.etcd, settings.deployment)
        self.instance = msgspec.structs.replace(self.instance, epoch=epoch)
        await self.discovery.register(self.instance)
        self._registered = True

    async def _drained(self) -> bool:
        """Takes the instance out of use; False: that was taken back, and it is in use again."""
        self.log.info("draining", longest_s=round(self._drain.left_s, 3))
        await self._publish(state=State.DRAINING)
        if self.instance.role:
            await routers_confirm(self.instance, self.discovery, self.channels, self.log)
        self._drain.begun.set()
        if await self._drain.run(self._service.drain):
            return True
        self._drain.begun.clear()
        await self._service.resume()
        await self._publish(state=State.READY if self._able else State.STARTING)
        self._drain.undone.set()
        self.log.info("the drain was taken back")
        return False

    async def _fail(self, error: Exception) -> str:
        expected = isinstance(error, TokenmillError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        self.log.error("failed", reason=reason, exc_info=None if expected else error)
        if self._registered:
            await self._publish(state=State.FAILED, progress=reason)
        return reason

    async def _stop(self, code: int, reason: str) -> None:
        """Ends everything; what cannot be ended in order is logged and left to the end of the process."""
        with self._logged("stopping the service"):
            async with asyncio.timeout(_FORCED_STOP_S if code == _FORCED else _STOP_S):
                await self._service.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with self._logged("leaving the deployment"):
            if self._registered and code in (_OK, _FORCED):
                await self.discovery.deregister()
            await self._closing.aclose()
        # The last line of a log is what people, and a supervisor, look at first: it says why.
        self.log.info("stopped", exit_code=code, **({"reason": reason} if reason else {}))

    def _on_signal(self, life: asyncio.Task[Any]) -> None:
        if not self._signalled:
            self._signalled = True
            self._drain.ask(self.settings.drain_timeout_s, final=True)
        elif not life.cancelling():
            life.cancel()
        else:
            os._exit(_FORCED)

    def _on_quit(self) -> None:
        self._drain.ask(_PATIENT_S, final=True)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("a task of the service broke", task=task.get_name(), exc_info=error)
            if not self._failure.done():
                self._failure.set_result(f"{task.get_name()} broke: {type(error).__name__}: {error}")

    async def _publish(self, **changes: Any) -> None:
        """Changes this instance's record, and what its health service says."""
        self.instance = msgspec.structs.replace(self.instance, **changes)
        await self._listener.set_serving(self.instance.state is State.READY)
        await self.discovery.update(self.instance)

    async def _tidy_channels(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_S)
            self.channels.tidy({one.address for one in self.discovery.instances.values()})

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.log.exception(f"{what} failed")
