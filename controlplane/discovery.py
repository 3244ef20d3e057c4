"""Who exists, where, in which state: every instance's record in etcd, and everyone's picture of them all.

    /tokenmill/<deployment>/seed                                 the deployment's hash seed
    /tokenmill/<deployment>/instances/<service>/<instance_id>    an `Instance`, under its owner's lease

How a record ends says what became of its owner. One that leaves overwrites its record with nothing, a farewell (the
lease removes the key later): others forget it at once. One whose key vanishes has only gone quiet, its lease lapsed:
others hold it SUSPECT and forget it later. A farewell is a value and not a deletion so that whoever missed the moment
and lists later can still tell the two apart.

Losing etcd changes nobody's picture. When it is back, even empty, each writes the same record again; whose record is
missing then has one lease's time to do so before it is suspected.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import grpc
import msgspec
from etcd3aio import prefix_range_end
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService
from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.errors import Unavailable
from controlplane.etcd import (
    CALL_S,
    FAILURES,
    SessionLost,
    lease_renewed,
    open_channel,
    parse_endpoints,
    until_disconnected,
    watch_prefix,
)
from controlplane.instances import Instance, decode_instance, encode_instance
from controlplane.picture import Picture
from controlplane.telemetry import get_logger

__all__ = ["LEASE_S", "Discovery"]

LEASE_S = 10
_KEEPALIVE_S = 2.5
_RELIST_S = 30.0
_RETRY_S, _LONGEST_RETRY_S = 0.1, 1.0
_SAY_WAITING_S = 10.0
_FAREWELL = b""


class _Seed(NamedTuple):
    """Of two seeds made for one deployment the older is right."""

    made_at_ns: int
    seed: int

    @classmethod
    def decode(cls, value: bytes) -> _Seed:
        made_at, seed = value.decode().split()
        return cls(int(made_at), int(seed, 16))

    def encode(self) -> bytes:
        return f"{self.made_at_ns} {self.seed:016x}".encode()


class Discovery:
    """This process's picture of the deployment, and its own record in it.

    One task holds a session with etcd: a connection, a list, a watch and a lease. Whatever breaks ends the session, and
    the next one begins from the start, so that there is one way to connect, resume and recover.
    """

    def __init__(self, endpoints: str, deployment: str, registry: CollectorRegistry) -> None:
        self.deployment = deployment
        self._endpoints = parse_endpoints(endpoints)
        self._where = endpoints
        self._log = get_logger(__name__)
        self._prefix = f"/tokenmill/{deployment}/"
        self._picture = Picture()
        self._callbacks: list[Callable[[], None]] = []
        self._next_change: asyncio.TimerHandle | None = None
        self._revision = 0
        """Everything up to this revision of the store is in the picture."""
        self._seed: _Seed | None = None
        self._conflict: str | None = None
        self.superseded = False
        """Another process has taken the place of one of ours, under the same id."""

        self._records: dict[str, bytes] = {}
        """Our own records as they ought to be, by key: one, or those of all the instances in this process."""
        self._written: dict[str, bytes] = {}
        """As they are."""
        self._lost: set[str] = set()
        """Keys that were ours, and are those of processes that began later."""
        self._record_changed = asyncio.Event()
        self._record_written = asyncio.Event()

        self._live = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stale_metric = Gauge("tokenmill_discovery_stale", "1 while the picture may be old", registry=registry)
        self._stale_metric.set(1)
        self._sessions = Counter("tokenmill_discovery_sessions", "Sessions with etcd begun", registry=registry)

    @classmethod
    async def connect(
        cls, endpoints: str, deployment: str, registry: CollectorRegistry, *, timeout_s: float | None = None
    ) -> Discovery:
        """Returns with a complete picture. Waits for etcd until `timeout_s` (`Unavailable`), or for ever."""
        discovery = cls(endpoints, deployment, registry)
        discovery._task = asyncio.create_task(discovery._run(), name="discovery")
        try:
            async with asyncio.timeout(timeout_s):
                await discovery._live.wait()
        except TimeoutError:
            await discovery.close()
            raise Unavailable(f"no etcd answers at {endpoints} after {timeout_s:g} s; is it running?") from None
        except asyncio.CancelledError:
            await discovery.close()
            raise
        return discovery

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Every instance by its id, as last known; a live view. SUSPECT stands for one that has gone quiet."""
        return MappingProxyType(self._picture.instances)

    def by_service(self, service: str) -> list[Instance]:
        """The instances of one service."""
        return [instance for instance in self._picture.instances.values() if instance.service == service]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each change of the picture. Returns how to end that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    @property
    def stale(self) -> bool:
        """True while etcd is away: the picture is the last one."""
        return not self._live.is_set()

    async def deployment_seed(self) -> int:
        """The 64-bit seed of the deployment's block hashes. Made once, by whoever comes first; it never changes."""
        assert self._seed is not None
        return self._seed.seed

    def failed(self) -> str | None:
        """Why this process must not go on, or None."""
        return self._conflict

    async def register(self, instance: Instance) -> None:
        """Publishes a record of ours and holds its lease until `deregister`."""
        await self.update(instance)

    async def update(self, instance: Instance) -> None:
        """Publishes another version of our record. While etcd is away it returns at once; the record follows later."""
        await self._publish({self._key(instance): encode_instance(instance)})

    async def deregister(self) -> None:
        """Says farewell: others forget us at once."""
        if self._records:
            await self._publish(dict.fromkeys(self._records, _FAREWELL))

    async def close(self) -> None:
        """Ends the session. Without `deregister`, others find us gone quiet when the lease lapses."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._next_change is not None:
            self._next_change.cancel()

    def _key(self, instance: Instance) -> str:
        return f"{self._prefix}instances/{instance.service}/{instance.instance_id}"

    async def _publish(self, records: dict[str, bytes]) -> None:
        self._records |= {key: record for key, record in records.items() if key not in self._lost}
        self._record_written.clear()
        self._record_changed.set()
        if not self.stale:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_S):
                    await self._record_written.wait()

    async def _run(self) -> None:
        retry_s, said_at = _RETRY_S, 0.0
        while True:
            was_live = False
            try:
                # A task of its own. A group that one of its tasks ends leaves the task around it counted as cancelled,
                # and up to Python 3.11.2 the next timeout in that task then cancels it instead of raising.
                await asyncio.create_task(self._session(), name="session with etcd")
            except* FAILURES as group:
                was_live, reason = self._live.is_set(), _reason(group)
                if was_live:
                    self._log.warning("lost etcd; keeping the last picture", error=reason)
                elif time.monotonic() - said_at > _SAY_WAITING_S:
                    self._log.warning(f"waiting for etcd at {self._where}", error=reason)
                    said_at = time.monotonic()
            except* Exception as group:
                self._log.error("the session with etcd broke unexpectedly", exc_info=group)
            self._live.clear()
            self._stale_metric.set(1)
            retry_s = _RETRY_S if was_live else min(retry_s * 2, _LONGEST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def _session(self) -> None:
        """Lasts until something breaks; then raises."""
        self._sessions.inc()
        channel = await open_channel(self._endpoints)
        try:
            kv, lease = KVService(channel, max_attempts=1), LeaseService(channel, max_attempts=1)
            await self._agree_on_seed(kv)
            self._revision = 0
            await self._list(kv, grace_s=LEASE_S)
            async with asyncio.TaskGroup() as session:
                session.create_task(self._watch(channel))
                session.create_task(self._relist(kv))
                session.create_task(self._hold_record(kv, lease))
                session.create_task(until_disconnected(channel))
                self._live.set()
                self._stale_metric.set(0)
                self._log.info("connected to etcd", at=self._where, instances=len(self.instances))
        finally:
            await channel.close()

    async def _agree_on_seed(self, kv: KVService) -> None:
        """Makes the seed where there is none. Where etcd came back empty, that is the one we already work with."""
        key = f"{self._prefix}seed"
        mine = self._seed or _Seed(time.time_ns(), secrets.randbits(64))
        absent = kv.txn_compare_create_revision(key, 0)
        answer = await kv.txn([absent], [kv.txn_op_put(key, mine.encode())], [kv.txn_op_get(key)], timeout=CALL_S)
        theirs = mine if answer.succeeded else _Seed.decode(answer.responses[0].response_range.kvs[0].value)
        if self._seed is not None and theirs < mine:
            self._conflict = "the deployment has another hash seed than this process; it must start anew"
        elif self._seed is not None and theirs > mine:
            # Someone new found etcd empty before any of us was back. Its watch shows it ours, and it starts anew.
            await kv.put(key, mine.encode(), timeout=CALL_S)
        else:
            self._seed = theirs

    async def _list(self, kv: KVService, grace_s: float) -> None:
        prefix = f"{self._prefix}instances/"
        answer = await kv.get(prefix, prefix_range_end(prefix), timeout=CALL_S)
        if answer.header.revision < self._revision:
            return  # the watch is ahead of this answer
        self._revision = answer.header.revision
        present = {kv.key.decode().rpartition("/")[2]: self._decoded(kv.key, kv.value) for kv in answer.kvs}
        for one in answer.kvs:
            self._compare(one.key.decode(), one.value)
        self._picture.listed(present, time.monotonic(), grace_s)
        self._write_again(key for key in self._records if key.rpartition("/")[2] not in present)
        self._changed()

    async def _relist(self, kv: KVService) -> None:
        """In case a break inside the watch hid something."""
        while True:
            await asyncio.sleep(_RELIST_S)
            await self._list(kv, grace_s=0.0)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        async with contextlib.aclosing(watch_prefix(channel, self._prefix, self._revision + 1)) as watched:
            async for events in watched:
                fresh = [event for event in events if event.kv.mod_revision > self._revision]
                for event in fresh:
                    self._see(event.kv.key, None if event.type == event.DELETE else event.kv.value)
                    self._revision = max(self._revision, event.kv.mod_revision)
                if fresh:
                    self._changed()

    def _see(self, key: bytes, value: bytes | None) -> None:
        """One change of one key; None: it vanished."""
        name = key.decode()
        if name == f"{self._prefix}seed":
            assert self._seed is not None
            if value is None or _Seed.decode(value) != self._seed:
                raise SessionLost("the deployment's seed changed")
        elif value is None:
            self._picture.vanished(name.rpartition("/")[2], time.monotonic())
            if name in self._records:
                self._write_again([name])
        else:
            self._compare(name, value)
            if (instance := self._decoded(key, value)) is None:
                self._picture.left(name.rpartition("/")[2])
            else:
                self._picture.present(instance)

    def _compare(self, key: str, value: bytes) -> None:
        """Of two processes that go by one id the one that began later is right; the other's word is written over."""
        record = self._records.get(key, _FAREWELL)
        if record == _FAREWELL:
            return
        mine, other = decode_instance(record), self._decoded(key.encode(), value)
        if other is None or other.epoch < mine.epoch:
            self._write_again([key])
        elif other.epoch > mine.epoch:
            self._lost.add(key)
            del self._records[key]
            self._written.pop(key, None)
            self.superseded = True
            self._conflict = (
                f"another process (pid {other.pid} on {other.host}) goes by the id {mine.instance_id}, too, and began"
                " later: give each its own instance_id"
            )

    def _decoded(self, key: bytes, value: bytes) -> Instance | None:
        """The instance, or None for a farewell and for a record of a version we cannot read."""
        if value == _FAREWELL:
            return None
        try:
            return decode_instance(value)
        except msgspec.MsgspecError as error:
            self._log.warning("ignoring an instance whose record cannot be read", key=key.decode(), error=str(error))
            return None

    async def _hold_record(self, kv: KVService, lease: LeaseService) -> None:
        """Keeps our records in etcd as they ought to be, and the lease under them alive."""
        loop = asyncio.get_running_loop()
        self._written = {}
        lease_id, renewed_at = 0, loop.time()
        while True:
            self._record_changed.clear()
            if self._records and lease_id == 0:
                lease_id = (await lease.grant(LEASE_S, timeout=CALL_S)).ID
                self._written = {}
            for key in [key for key, record in self._records.items() if record is not self._written.get(key)]:
                if key not in self._written:
                    await self._look_at(kv, key)
                if (record := self._records.get(key)) is not None:
                    await kv.put(key, record, lease=lease_id, timeout=CALL_S)
                    self._written[key] = record
            if not self._record_changed.is_set():
                self._record_written.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(renewed_at + _KEEPALIVE_S):
                    await self._record_changed.wait()
            if loop.time() >= renewed_at + _KEEPALIVE_S:
                renewed_at = loop.time()
                if lease_id != 0 and not await lease_renewed(lease, lease_id):
                    self._log.warning("our lease lapsed; registering again")
                    lease_id = 0

    async def _look_at(self, kv: KVService, key: str) -> None:
        """Who was away for long may have been followed by another process, whose record must stay."""
        for found in (await kv.get(key, timeout=CALL_S)).kvs:
            if self._decoded(found.key, found.value) is not None:
                self._compare(key, found.value)

    def _write_again(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._written.pop(key, None)
            self._record_changed.set()

    def _changed(self) -> None:
        """Wakes those who listen, and ourselves when someone quiet is due to be suspected or forgotten."""
        if self._next_change is not None:
            self._next_change.cancel()
            self._next_change = None
        now = time.monotonic()
        due = self._picture.next_change(now)
        if due is not None:
            self._next_change = asyncio.get_running_loop().call_later(due - now, self._advance)
        for callback in list(self._callbacks):
            try:
                callback()
            except Exception:
                self._log.exception("a listener failed")

    def _advance(self) -> None:
        if not self.stale:
            self._picture.advance(time.monotonic())
            self._changed()


def _reason(group: BaseExceptionGroup[BaseException]) -> str:
    """What to tell of a broken session: one of its reasons."""
    match group.exceptions[0]:
        case BaseExceptionGroup() as inner:
            return _reason(inner)
        case grpc.aio.AioRpcError() as error:
            return error.details() or error.code().name
        case error:
            return str(error) or type(error).__name__
