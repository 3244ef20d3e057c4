"""Keeps the router's picture true: what workers publish, what discovery says of them, and snapshots where those fail.

Events and load reports come over NATS, which may lose any of them. A `Follower` for each rank of a worker notices;
then the worker's snapshot is fetched, one at a time a worker, again and again with growing pauses until it is in step
or gone. When nothing comes, the index is looked over for damage, which a snapshot mends too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
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
from kvcache.integrity import Inspection
from kvcache.load import LoadReport
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc

__all__ = ["Ingest", "Listener"]

FETCH_S = 10.0
AT_ONCE = 32
"""Snapshots fetched at a time: few enough to keep deciding meanwhile, enough that a hung worker holds up no other."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
MOST_RANKS = 1024
"""Of one worker; a message that names a higher one is not believed."""
HOUSE_S = 0.1
HOUSE_BLOCKS = 2_000
"""Blocks tidied, and when nothing came since, looked over, each `HOUSE_S`: about 0.2 ms."""


class Listener(Protocol):
    """Who else wants to know of workers."""

    def on_instances(self, instances: Mapping[str, Instance]) -> None:
        """The picture changed."""

    def on_load(self, report: LoadReport) -> None:
        """A worker reported its load."""

    def on_forget(self, instance_id: str) -> None:
        """A worker is gone, or has begun a new life."""


class _Worker:
    """The followers of one worker's ranks; rank 0 is always there, others from when they are heard of."""

    def __init__(self, index: KvIndex, instance_id: str, epoch: int) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        """The latest that anyone has told of."""
        self.ranks = {0: Follower(index, instance_id, epoch)}
        self._index = index

    @property
    def gap(self) -> Gap | None:
        """Why it needs a snapshot."""
        return next((follower.gap for follower in self.ranks.values() if follower.gap is not None), None)

    def rank(self, dp_rank: int) -> Follower:
        """Raises `ValueError` for one that cannot be."""
        follower = self.ranks.get(dp_rank)
        if follower is None:
            if dp_rank >= MOST_RANKS:
                raise ValueError(f"data-parallel rank {dp_rank} is above {MOST_RANKS - 1}")
            follower = self.ranks[dp_rank] = Follower(self._index, self.instance_id, self.epoch, dp_rank)
        return follower

    def close(self) -> None:
        """Forgets all ranks."""
        for follower in self.ranks.values():
            follower.close()


class Ingest:
    """Owns the followers of each worker discovery knows, and the tasks that fetch snapshots."""

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
        self._workers: dict[str, _Worker] = {}
        self._mending: set[str] = set()
        """Workers in `_to_mend`, or with a task."""
        self._to_mend: asyncio.Queue[str] = asyncio.Queue()
        self._in_step = asyncio.Event()
        self._subscriptions: list[Callable[[], Awaitable[None]]] = []
        self._unsubscribe: Callable[[], None] = lambda: None
        self._gaps = Counter(
            "tokenmill_router_gaps", "Times a worker's picture needed a snapshot", ["reason"], registry=registry
        )
        self._fetched = Counter("tokenmill_router_snapshots", "Snapshots fetched", ["result"], registry=registry)
        self._damages = Counter(
            "tokenmill_router_index_damages",
            "Ranks of workers whose part of the index was found wrong",
            registry=registry,
        )
        self._forgotten = Counter(
            "tokenmill_router_index_forgotten_blocks", "KV blocks a full index had no room for", registry=registry
        )
        Gauge(
            "tokenmill_router_index_blocks", "Distinct KV blocks known of all workers", registry=registry
        ).set_function(lambda: len(index))
        Gauge(
            "tokenmill_router_stale_workers", "Workers whose picture waits for a snapshot", registry=registry
        ).set_function(lambda: len(self._mending))

    @property
    def followers(self) -> list[Follower]:
        """One for each rank of each worker."""
        return [follower for worker in self._workers.values() for follower in worker.ranks.values()]

    @property
    def waiting(self) -> Collection[str]:
        """Workers whose picture waits for a snapshot: a decision about them is made half blind."""
        return self._mending

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
                tasks.create_task(self._keep_house(), name="index house")
                while True:
                    instance_id = await self._to_mend.get()
                    tasks.create_task(self._mend(instance_id, slots), name=f"snapshot of {instance_id}")
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
        found = {one.instance_id: one for one in self._discovery.instances.values() if one.role}
        for instance_id in self._workers.keys() - found.keys():
            self._workers.pop(instance_id).close()
            self._listener.on_forget(instance_id)
        for instance_id, instance in found.items():
            worker = self._workers.get(instance_id)
            if worker is None:
                worker = self._workers[instance_id] = _Worker(self._index, instance_id, instance.epoch)
            for follower in worker.ranks.values():
                follower.restart(instance.epoch)
            self._see_to(worker)
        self._listener.on_instances(self._discovery.instances)
        self._note_step()

    def _on_events(self, subject: str, data: bytes) -> None:
        worker = self._workers.get(kv_wire.subject_instance(subject))
        if worker is None:
            return  # discovery will show it, and its snapshot has this
        try:
            batch = kv_wire.batch_from_bytes(data)
            follower = worker.rank(batch.dp_rank)
        except (DecodeError, ValueError) as error:
            self._log.warning("KV events that cannot be read", worker=worker.instance_id, error=str(error))
            for follower in worker.ranks.values():
                follower.lose(Gap.MISSED)
        else:
            follower.on_batch(batch)
        self._see_to(worker)

    def _on_load(self, subject: str, data: bytes) -> None:
        worker = self._workers.get(kv_wire.subject_instance(subject))
        if worker is None:
            return
        try:
            report = kv_wire.load_from_bytes(data)
            checked = [(worker.rank(check.dp_rank), check) for check in report.checks]
        except (DecodeError, ValueError) as error:
            self._log.warning("load report that cannot be read", worker=worker.instance_id, error=str(error))
            return
        for follower, check in checked:
            follower.on_check(report.epoch, check)
        self._see_to(worker)
        if report.epoch == worker.epoch:
            self._listener.on_load(report)

    def _on_lost_connection(self) -> None:
        for worker in self._workers.values():
            for follower in worker.ranks.values():
                follower.lose(Gap.DISCONNECTED)
            self._see_to(worker)

    def _see_to(self, worker: _Worker) -> None:
        """What has to be done after a follower took something in."""
        latest = max(follower.epoch for follower in worker.ranks.values())
        if latest > worker.epoch:
            worker.epoch = latest
            for follower in worker.ranks.values():
                follower.restart(latest)
            self._listener.on_forget(worker.instance_id)
        gap = worker.gap
        if gap is not None and worker.instance_id not in self._mending and self._can_answer(worker):
            self._gaps.labels(gap.value).inc()
            self._mending.add(worker.instance_id)
            self._in_step.clear()
            self._to_mend.put_nowait(worker.instance_id)

    def _can_answer(self, worker: _Worker) -> bool:
        instance = self._discovery.instances.get(worker.instance_id)
        return instance is not None and instance.state not in (State.STARTING, State.FAILED)

    async def _mend(self, instance_id: str, slots: asyncio.Semaphore) -> None:
        """Fetches snapshots until the worker is in step, or nobody follows it any more."""
        pause_s = FIRST_PAUSE_S
        while (worker := self._workers.get(instance_id)) and worker.gap is not None and self._can_answer(worker):
            async with slots:
                mended = await self._fetch(worker)
            self._fetched.labels("ok" if mended else "failed").inc()
            if not mended:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._mending.discard(instance_id)
        self._note_step()

    async def _fetch(self, worker: _Worker) -> bool:
        instance = self._discovery.instances.get(worker.instance_id)
        if instance is None:
            return False
        known = set(worker.ranks)
        snapshots: dict[int, tuple[Snapshot, int, int]] = {}
        """(the picture, its epoch, its number) by rank."""
        try:
            await self._receive(instance.address, worker, snapshots)
            if 0 not in snapshots:
                raise Unavailable("the worker sent an empty snapshot")
        except (grpc.aio.AioRpcError, Unavailable, ValueError) as error:
            _abandon(snapshots)
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._log.info("no snapshot yet", worker=worker.instance_id, gap=worker.gap, reason=reason)
            return False
        except asyncio.CancelledError:
            _abandon(snapshots)
            raise
        if self._workers.get(worker.instance_id) is not worker:
            _abandon(snapshots)
            return False
        for snapshot, epoch, seq in snapshots.values():
            snapshot.finish(epoch, seq)
        for gone in known - snapshots.keys():
            worker.ranks.pop(gone).close()
        self._see_to(worker)
        return worker.gap is None

    async def _receive(self, address: str, worker: _Worker, snapshots: dict[int, tuple[Snapshot, int, int]]) -> None:
        stub = kv_pb2_grpc.KvSourceStub(self._channels.get(address))
        async for part in stub.GetKvSnapshot(kv_pb2.GetKvSnapshotRequest(), timeout=FETCH_S):
            if len(part.parents) != len(part.hashes):
                raise ValueError(f"a snapshot part has {len(part.parents)} parents for {len(part.hashes)} blocks")
            if part.dp_rank not in snapshots:
                snapshots[part.dp_rank] = worker.rank(part.dp_rank).snapshot(), part.epoch, part.seq
            parents = [parent or None for parent in part.parents]
            snapshots[part.dp_rank][0].add(kv_wire.tier_from_proto(part.tier), list(part.hashes), parents)

    async def _keep_house(self) -> None:
        """Sweeps what lost workers left behind; looks for damage while nothing comes."""
        inspection, seen, forgotten = Inspection(self._index), -1, 0
        while True:
            await asyncio.sleep(HOUSE_S)
            self._index.tidy(HOUSE_BLOCKS)
            self._forgotten.inc(self._index.forgotten - forgotten)
            forgotten = self._index.forgotten
            if seen != self._index.changes:
                seen = self._index.changes
                continue
            damaged = inspection.step(HOUSE_BLOCKS)
            for worker in list(self._workers.values()):
                for follower in worker.ranks.values():
                    if follower.holder in damaged and follower.gap is None:
                        self._damages.inc()
                        wrong = damaged[follower.holder]
                        self._log.error("the index is damaged", worker=worker.instance_id, wrong=wrong)
                        follower.lose(Gap.DAMAGED)
                if damaged:
                    self._see_to(worker)

    def _note_step(self) -> None:
        if not self._mending:
            self._in_step.set()


def _abandon(snapshots: dict[int, tuple[Snapshot, int, int]]) -> None:
    for snapshot, _, _ in snapshots.values():
        snapshot.abandon()
