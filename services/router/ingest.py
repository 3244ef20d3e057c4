"""Keeps the router's picture true: what workers publish, what discovery says of them, and snapshots where those fail.

Events and load reports come over NATS, which may lose any of them. A `Follower` for each worker notices; then its
snapshot is fetched, one at a time a worker, again and again with growing pauses until it is in step or gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane import kv_wire
from controlplane.bus import Bus
from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import Unavailable
from controlplane.instances import Instance, State
from controlplane.telemetry import get_logger
from kvcache.follower import Follower, Gap, Snapshot
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc

__all__ = ["Ingest", "Listener"]

FETCH_S = 10.0
AT_ONCE = 32
"""Snapshots fetched at a time: few enough to keep deciding meanwhile, enough that a hung worker holds up no other."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Listener(Protocol):
    """Who else wants to know of workers."""

    def on_instances(self, instances: Mapping[str, Instance]) -> None:
        """The picture changed."""

    def on_load(self, report: LoadReport) -> None:
        """A worker reported its load."""

    def on_forget(self, instance_id: str) -> None:
        """A worker is gone, or has begun a new life."""


class Ingest:
    """Owns a follower for each worker discovery knows, and the tasks that fetch snapshots."""

    def __init__(
        self,
        index: KvIndex,
        listener: Listener,
        *,
        deployment: str,
        discovery: Discovery,
        bus: Bus,
        channels: Channels,
        registry: CollectorRegistry,
    ) -> None:
        self._index = index
        self._listener = listener
        self._deployment = deployment
        self._discovery = discovery
        self._bus = bus
        self._channels = channels
        self._log = get_logger(__name__)
        self._followers: dict[str, Follower] = {}
        self._mending: set[str] = set()
        """Workers in `_to_mend`, or with a task."""
        self._to_mend: asyncio.Queue[Follower] = asyncio.Queue()
        self._in_step = asyncio.Event()
        self._subscriptions: list[Callable[[], Awaitable[None]]] = []
        self._unsubscribe: Callable[[], None] = lambda: None
        self._gaps = Counter(
            "tokenmill_router_gaps", "Times a worker's picture needed a snapshot", ["reason"], registry=registry
        )
        self._fetched = Counter("tokenmill_router_snapshots", "Snapshots fetched", ["result"], registry=registry)
        Gauge(
            "tokenmill_router_index_blocks", "Distinct KV blocks known of all workers", registry=registry
        ).set_function(lambda: len(index))
        Gauge(
            "tokenmill_router_stale_workers", "Workers whose picture waits for a snapshot", registry=registry
        ).set_function(lambda: len(self._mending))

    @property
    def followers(self) -> Mapping[str, Follower]:
        """By instance id; read only."""
        return self._followers

    async def begin(self) -> None:
        """Subscribes, and takes discovery's present picture; the snapshots it asks for wait for `run`."""
        for subject, on_message in (
            (kv_wire.kv_subject(self._deployment, "*"), self._on_events),
            (kv_wire.load_subject(self._deployment, "*"), self._on_load),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, on_message, self._on_lost_connection))
        self._unsubscribe = self._discovery.subscribe(self._on_instances)
        self._on_instances()

    async def run(self) -> None:
        """Follows until cancelled."""
        slots = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    follower = await self._to_mend.get()
                    tasks.create_task(self._mend(follower, slots), name=f"snapshot of {follower.instance_id}")
        finally:
            self._unsubscribe()
            for end in self._subscriptions:
                await end()

    async def wait_in_step(self, timeout_s: float) -> bool:
        """Waits until no worker's picture needs a snapshot. False: it took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._in_step.wait()
        except TimeoutError:
            return False
        return True

    def _on_instances(self) -> None:
        workers = {one.instance_id: one for one in self._discovery.instances.values() if one.role}
        for instance_id in self._followers.keys() - workers.keys():
            self._followers.pop(instance_id).close()
            self._listener.on_forget(instance_id)
        for instance_id, worker in workers.items():
            follower = self._followers.get(instance_id)
            if follower is None:
                follower = self._followers[instance_id] = Follower(self._index, instance_id, worker.epoch)
            known = follower.epoch
            follower.restart(worker.epoch)
            self._see_to(follower, known)
        self._listener.on_instances(self._discovery.instances)
        self._note_step()

    def _on_events(self, subject: str, data: bytes) -> None:
        follower = self._followers.get(kv_wire.subject_instance(subject))
        if follower is None:
            return  # discovery will show it, and its snapshot has this
        try:
            batch = kv_wire.batch_from_bytes(data)
        except (DecodeError, ValueError) as error:
            self._log.warning("KV events that cannot be read", worker=follower.instance_id, error=str(error))
            follower.lose(Gap.MISSED)
            self._see_to(follower, follower.epoch)
            return
        known = follower.epoch
        follower.on_batch(batch)
        self._see_to(follower, known)

    def _on_load(self, subject: str, data: bytes) -> None:
        follower = self._followers.get(kv_wire.subject_instance(subject))
        if follower is None:
            return
        try:
            report = kv_wire.load_from_bytes(data)
        except DecodeError as error:
            self._log.warning("load report that cannot be read", worker=follower.instance_id, error=str(error))
            return
        known = follower.epoch
        follower.on_report(report)
        self._see_to(follower, known)
        if report.epoch == follower.epoch:
            self._listener.on_load(report)

    def _on_lost_connection(self) -> None:
        for follower in self._followers.values():
            follower.lose(Gap.DISCONNECTED)
            self._see_to(follower, follower.epoch)

    def _see_to(self, follower: Follower, known_epoch: int) -> None:
        """What has to be done after a follower took something in."""
        if follower.epoch != known_epoch:
            self._listener.on_forget(follower.instance_id)
        if follower.gap is not None and follower.instance_id not in self._mending and self._can_answer(follower):
            self._gaps.labels(follower.gap.value).inc()
            self._mending.add(follower.instance_id)
            self._in_step.clear()
            self._to_mend.put_nowait(follower)

    def _can_answer(self, follower: Follower) -> bool:
        worker = self._discovery.instances.get(follower.instance_id)
        return worker is not None and worker.state not in (State.STARTING, State.FAILED)

    async def _mend(self, follower: Follower, slots: asyncio.Semaphore) -> None:
        """Fetches snapshots until the follower is in step, or nobody follows that worker any more."""
        pause_s = FIRST_PAUSE_S
        while follower.gap is not None and self._is_followed(follower) and self._can_answer(follower):
            async with slots:
                mended = await self._fetch(follower)
            self._fetched.labels("ok" if mended else "failed").inc()
            if not mended:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._mending.discard(follower.instance_id)
        self._note_step()
        successor = self._followers.get(follower.instance_id)
        if successor is not None:
            self._see_to(successor, successor.epoch)  # its gap had to wait while this ran

    async def _fetch(self, follower: Follower) -> bool:
        worker = self._discovery.instances.get(follower.instance_id)
        if worker is None:
            return False
        snapshot = follower.snapshot()
        try:
            epoch, seq = await self._receive(worker.address, snapshot)
        except (grpc.aio.AioRpcError, Unavailable, ValueError) as error:
            snapshot.abandon()
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._log.info("no snapshot yet", worker=follower.instance_id, gap=follower.gap, reason=reason)
            return False
        except asyncio.CancelledError:
            snapshot.abandon()
            raise
        if not self._is_followed(follower):
            snapshot.abandon()
            return False
        known = follower.epoch
        mended = snapshot.finish(epoch, seq)
        self._see_to(follower, known)
        return mended

    async def _receive(self, address: str, snapshot: Snapshot) -> tuple[int, int]:
        stub = kv_pb2_grpc.KvSourceStub(self._channels.get(address))
        stamp: tuple[int, int] | None = None
        async for part in stub.GetKvSnapshot(kv_pb2.GetKvSnapshotRequest(), timeout=FETCH_S):
            stamp = part.epoch, part.seq
            if len(part.parents) != len(part.hashes):
                raise ValueError(f"a snapshot part has {len(part.parents)} parents for {len(part.hashes)} blocks")
            parents = [parent or None for parent in part.parents]
            snapshot.add(kv_wire.tier_from_proto(part.tier), list(part.hashes), parents)
        if stamp is None:
            raise Unavailable("the worker sent an empty snapshot")
        return stamp

    def _is_followed(self, follower: Follower) -> bool:
        return self._followers.get(follower.instance_id) is follower

    def _note_step(self) -> None:
        if not self._mending:
            self._in_step.set()
