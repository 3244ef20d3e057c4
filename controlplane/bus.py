"""The event bus: core NATS, at most once. What is published while nobody is connected is lost, and counted.

Whoever needs completeness numbers its messages and listens to `on_gap`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.errors import SettingsError
from controlplane.telemetry import get_logger

__all__ = ["Bus"]

OnMessage = Callable[[str, bytes], None]
OnGap = Callable[[], None]

_CONNECT_TIMEOUT_S = 3.0
_RETRY_S = 0.25
_PING_S, _LOST_PINGS = 5, 3
"""A NATS that stopped answering is left after about 15 s; a stall of some seconds is not mistaken for that."""
_UNSENT_BYTES = 16 << 20
_FAILURES = (OSError, nats.errors.Error, TimeoutError)


@dataclass(eq=False, slots=True)
class _Listener:
    subject: str
    on_message: OnMessage
    on_gap: OnGap
    client: Client | None = None
    """Where it is subscribed, or about to be."""
    subscription: Subscription | None = None


class Bus:
    """One connection to NATS, replaced by a new one whenever it breaks.

    The client library's own reconnecting is off: it gives up for good on some errors (being cut off by the server as a
    slow consumer is one), so there would have to be two ways back. Here there is one.
    """

    def __init__(self, servers: list[str], registry: CollectorRegistry) -> None:
        self._servers = servers
        self._log = get_logger(__name__)
        self._client: Client | None = None
        self._listeners: list[_Listener] = []
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._outbox_bytes = 0
        self._connected_metric = Gauge("tokenmill_bus_connected", "1 while connected to NATS", registry=registry)
        self._dropped = Counter("tokenmill_bus_dropped_messages", "Messages that could not be sent", registry=registry)
        self._gaps = Counter("tokenmill_bus_gaps", "Times a subscription may have missed something", registry=registry)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, registry: CollectorRegistry) -> Bus:
        """Tries once, and leaves the rest to the background for as long as it takes."""
        servers = [server.strip() for server in url.split(",")]
        for server in servers:
            if urlsplit(server).scheme not in ("nats", "tls") or not urlsplit(server).hostname:
                raise SettingsError(f"nats = {server!r} is not of the form nats://host:port", param="common.nats")
        bus = cls(servers, registry)
        tried = asyncio.Event()
        bus._task = asyncio.create_task(bus._run(tried), name="bus")
        await tried.wait()
        return bus

    @property
    def connected(self) -> bool:
        """Whether messages are sent and received now."""
        return self._client is not None

    def publish(self, subject: str, data: bytes) -> None:
        """Sends a message soon, in order; drops it when there is no connection, or one that cannot keep up."""
        if self._client is None or self._outbox_bytes + self._client.pending_data_size + len(data) > _UNSENT_BYTES:
            self._dropped.inc()
            return
        self._outbox.put_nowait((subject, data))
        self._outbox_bytes += len(data)

    async def subscribe(self, subject: str, on_message: OnMessage, on_gap: OnGap) -> Callable[[], Awaitable[None]]:
        """Calls `on_message(subject, data)` for each message of a subject (NATS wildcards work). Returns how to end it.

        `on_gap()` says that something may have been missed until now, and that what is published from now on arrives:
        the connection was away (the first one too), or messages came faster than they were taken.
        Neither callback may raise or block.
        """
        listener = _Listener(subject, on_message, on_gap)
        self._listeners.append(listener)
        if self._client is not None:
            # Should it break here, the next connection takes over. The round trip makes it true that what is published
            # after this call arrives.
            with contextlib.suppress(*_FAILURES):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await self._listen(self._client, listener)
                    await self._client.flush()

        async def unsubscribe() -> None:
            self._listeners.remove(listener)
            if listener.subscription is not None:
                with contextlib.suppress(*_FAILURES):
                    await listener.subscription.unsubscribe()

        return unsubscribe

    async def close(self) -> None:
        """Sends what is waiting, for a second at most, and disconnects."""
        if self._client is not None:
            with contextlib.suppress(*_FAILURES):
                async with asyncio.timeout(1.0):
                    await self._outbox.join()
                    await self._client.flush()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, tried: asyncio.Event) -> None:
        waiting = False
        while True:
            client, lost = Client(), asyncio.Event()
            try:
                await self._open(client, lost)
                waiting = False
                self._log.info("connected to NATS", servers=self._servers)
                tried.set()
                await self._serve(client, lost)
            except _FAILURES as error:
                if not waiting:
                    self._log.warning("waiting for NATS", servers=self._servers, error=str(error) or repr(error))
                waiting = True
            except Exception:
                self._log.exception("the connection to NATS broke unexpectedly")
            finally:
                await self._shut(client)
            tried.set()
            await asyncio.sleep(_RETRY_S)

    async def _open(self, client: Client, lost: asyncio.Event) -> None:
        async def on_lost() -> None:
            lost.set()

        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await client.connect(
                self._servers,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=_PING_S,
                max_outstanding_pings=_LOST_PINGS,
                # 0: the client never waits for the socket in `publish`, where it would swallow our cancellation, nor
                # buffers while disconnected. `publish` above bounds what is unsent.
                pending_size=0,
                disconnected_cb=on_lost,
                closed_cb=on_lost,
                error_cb=self._on_error,
            )
            while missing := [listener for listener in self._listeners if listener.client is not client]:
                for listener in missing:
                    await self._listen(client, listener)
                await client.flush()
        self._client = client
        self._connected_metric.set(1)
        for listener in list(self._listeners):
            self._gap(listener)

    async def _shut(self, client: Client) -> None:
        self._client = None
        self._connected_metric.set(0)
        while not self._outbox.empty():
            self._outbox.get_nowait()
            self._outbox.task_done()
            self._dropped.inc()
        self._outbox_bytes = 0
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(1.0):
                await client.close()

    async def _serve(self, client: Client, lost: asyncio.Event) -> None:
        """Sends what is published, until the connection is lost; then raises."""
        sender = asyncio.create_task(self._send(client), name="bus-sender")
        try:
            # The library's callbacks are skipped where its own closing fails half-way: so look as well.
            while client.is_connected and not lost.is_set() and not sender.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        await lost.wait()
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        raise nats.errors.ConnectionClosedError

    async def _send(self, client: Client) -> None:
        while True:
            subject, data = await self._outbox.get()
            self._outbox_bytes -= len(data)
            try:
                await client.publish(subject, data)
            except nats.errors.MaxPayloadError:
                self._dropped.inc()
                self._log.error("message too large for NATS", subject=subject, bytes=len(data))
            finally:
                self._outbox.task_done()

    async def _listen(self, client: Client, listener: _Listener) -> None:
        async def on_message(message: Msg) -> None:
            listener.on_message(message.subject, message.data)

        listener.client = client
        subscription = await client.subscribe(listener.subject, cb=on_message)
        if listener.client is client:
            listener.subscription = subscription

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for listener in self._listeners:
                if listener.subscription is error.sub:
                    self._gap(listener)
        elif not isinstance(error, _FAILURES):
            self._log.error("a message was not taken", exc_info=error)

    def _gap(self, listener: _Listener) -> None:
        self._gaps.inc()
        listener.on_gap()
