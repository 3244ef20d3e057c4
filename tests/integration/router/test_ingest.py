"""What a router's ingest makes of ranks, of a full index and of a damaged one; the rest is in test_router.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry

from controlplane.bus import Bus
from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.instances import Instance
from kvcache.events import Removed, Stored
from kvcache.index import KvIndex, Overlap
from kvcache.integrity import check_integrity
from kvcache.load import LoadReport
from services.router.ingest import Ingest
from tests.integration.router.cluster import Cluster, LightWorker, until


class Heard:
    """What an ingest tells of."""

    def __init__(self) -> None:
        self.reports: list[LoadReport] = []

    def on_instances(self, instances: Mapping[str, Instance]) -> None:
        """Not looked at here."""

    def on_load(self, report: LoadReport) -> None:
        self.reports.append(report)

    def on_forget(self, instance_id: str) -> None:
        """Not looked at here."""


class Followed:
    """An ingest that runs in this process."""

    def __init__(self, index: KvIndex, heard: Heard, ingest: Ingest, registry: CollectorRegistry) -> None:
        self.index, self.heard, self.ingest, self.registry = index, heard, ingest, registry

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"tokenmill_router_{name}", labels) or 0.0

    async def reports(self, count: int) -> None:
        """So many more load reports have been taken in."""
        enough = len(self.heard.reports) + count
        await until(lambda: len(self.heard.reports) >= enough, "load reports came", within_s=60)


Start = Callable[..., Awaitable[Followed]]


@asynccontextmanager
async def following(cluster: Cluster, max_blocks: int) -> AsyncIterator[Followed]:
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        discovery = await Discovery.connect(cluster.etcd, cluster.deployment, registry, timeout_s=60)
        stack.push_async_callback(discovery.close)
        bus = await Bus.connect(cluster.nats, registry)
        stack.push_async_callback(bus.close)
        channels = Channels()
        stack.push_async_callback(channels.close)
        index, heard = KvIndex(max_blocks), Heard()
        ingest = Ingest(
            index,
            heard,
            deployment=cluster.deployment,
            discovery=discovery,
            bus=bus,
            channels=channels,
            registry=registry,
        )
        await ingest.begin()
        running = asyncio.create_task(ingest.run())
        try:
            yield Followed(index, heard, ingest, registry)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.fixture
async def start(cluster: Cluster, stack: AsyncExitStack) -> Start:
    async def start(max_blocks: int = 10**6) -> Followed:
        return await stack.enter_async_context(following(cluster, max_blocks))

    return start


def say(worker: LightWorker, dp_rank: int, *events: Stored | Removed) -> None:
    worker.publisher.events(events, dp_rank)
    worker.publisher.flush()


async def test_every_rank_of_a_worker_is_followed_by_itself(cluster: Cluster, start: Start) -> None:
    worker = await cluster.start("w", "decode")
    say(worker, 0, Stored(None, (1, 2)))
    say(worker, 2, Stored(None, (1, 2, 3)))
    followed = await start()
    both = {("w", 0): Overlap(2), ("w", 2): Overlap(3)}
    await until(lambda: followed.index.held_by_rank([1, 2, 3]) == both, "the snapshot has both ranks")
    say(worker, 1, Stored(None, (1,)))
    say(worker, 2, Removed((3,)))
    all_three = {("w", 0): Overlap(2), ("w", 1): Overlap(1), ("w", 2): Overlap(2)}
    await until(lambda: followed.index.held_by_rank([1, 2, 3]) == all_three, "a new rank is followed, too")
    publish, worker.bus.publish = worker.bus.publish, lambda subject, data: None  # type: ignore[method-assign]
    say(worker, 1, Removed((1,)))
    worker.bus.publish = publish  # type: ignore[method-assign]
    del all_three["w", 1]
    await until(lambda: followed.index.held_by_rank([1, 2, 3]) == all_three, "a rank's lost message is mended")
    assert followed.index.held([1, 2, 3]) == {"w": Overlap(2)}


async def test_a_full_index_still_agrees_with_what_workers_report(cluster: Cluster, start: Start) -> None:
    worker = await cluster.start("w", "decode")
    followed = await start(max_blocks=50)
    await until(lambda: followed.metric("snapshots_total", result="ok") == 1, "the worker is known")
    worker.say(Stored(None, tuple(range(1, 201))))
    await followed.reports(2)
    worker.say(Removed(tuple(range(200, 20, -1))))
    await followed.reports(3)
    assert followed.metric("snapshots_total", result="ok") == 1
    assert len(followed.index) <= 50
    await until(lambda: followed.metric("index_forgotten_blocks_total") == 150, "what had no room is counted")
    assert followed.index.held(list(range(1, 201))) == {"w": Overlap(20)}


async def test_damage_is_found_while_nothing_comes_and_mended_by_a_snapshot(cluster: Cluster, start: Start) -> None:
    worker = await cluster.start("w", "decode")
    worker.say(Stored(None, (1, 2, 3)), Stored(None, (7, 8)))
    followed = await start()
    await until(lambda: followed.index.held([1, 2, 3]) == {"w": Overlap(3)}, "the worker is known")
    del followed.index.runs.by_hash[2]
    await until(lambda: followed.metric("index_damages_total") >= 1, "the damage is found", within_s=60)
    await until(lambda: followed.index.held([1, 2, 3]) == {"w": Overlap(3)}, "it is mended", within_s=60)
    assert followed.metric("gaps_total", reason="damaged") >= 1
    check_integrity(followed.index)


async def test_a_worker_whose_snapshot_is_awaited_is_known_to_be(cluster: Cluster, start: Start) -> None:
    worker = await cluster.start("w", "decode")
    worker.say(Stored(None, (1,)))
    worker.kv_source.refusals_left = 3
    followed = await start()
    assert set(followed.ingest.waiting) == {"w"}
    assert await followed.ingest.wait_in_step(20)
    assert set(followed.ingest.waiting) == set()
    assert followed.metric("stale_workers") == 0
