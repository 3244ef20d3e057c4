"""What the router's index costs: matching, ingesting, memory.

    python benchmarks/bench_index.py [--runs N]

CPU microseconds, median of the runs. A prompt has 512 blocks; workers hold it to six different depths. Beside our
targets stand the figures that are published of a well-known radix tree in Rust, on such a machine. It keeps fewer bytes
a block because its hashes are bare words; a Python dict keeps an object of 36 bytes for each. A compiled map of words
would close that.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from controlplane import kv_wire
from controlplane.bus import Bus
from controlplane.embedded import EmbeddedNats
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from kvcache.events import KvEventBatch, Stored, Tier
from kvcache.follower import Follower
from kvcache.index import KvIndex

BLOCKS = 512
DEPTHS = (0, 100, 200, 300, 400, 512)
EVENT_BLOCKS = 16
NATS_BLOCKS = 400 * BLOCKS
MEMORY_BLOCKS = (180_000, 345_000)
"""Python's dicts double at two thirds of a power of two; between two of those."""
START_TIMEOUT_S = 60.0


def main() -> None:
    """Measures everything and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="the median of so many is shown [default %(default)s]")
    parser.add_argument("--publish-to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    configure_logging(CommonSettings(log_level="warning"), service="bench")

    if arguments.publish_to:
        asyncio.run(publish(arguments.publish_to))
        return
    table = Table(title=f"Router index, CPU time, median of {arguments.runs}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("target", justify="right")
    table.add_column("a Rust radix tree", justify="right")

    def show(what: str, form: str, measure: Callable[[], float], target: str = "", rust: str = "") -> None:
        figure = form.format(statistics.median(measure() for _ in range(arguments.runs)))
        table.add_row(what, figure, target, rust)

    for workers, prompts, target in ((64, 200, "25 us"), (1024, 20, "45 us")):
        index, chains = filled(workers, prompts)
        blocks = f"{len(index):,} blocks in turn"
        show(
            f"match, {workers:,} workers, one prompt again and again",
            "{:.1f} us",
            partial(ask_us, index.match, chains[:1]),
        )
        show(f"match, {workers:,} workers, {blocks}", "{:.1f} us", partial(ask_us, index.match, chains))
        show(f"  and name every holder, {blocks}", "{:.1f} us", partial(ask_us, index.held, chains), target, "27-46 us")
    index, chains = filled(64, 200, tiers=True)
    show("  64 workers, a third of the blocks in host memory", "{:.1f} us", partial(ask_us, index.held, chains))
    show("match, nobody has the first block", "{:.2f} us", partial(ask_us, index.match, [chain(random.Random(0))]))
    show("store a block", "{:.2f} us", lambda: ingest_us()[0], "1 us", "0.54 us")
    show("store a block others hold, 64 workers", "{:.2f} us", store_shared_us)
    show("remove a block", "{:.2f} us", lambda: ingest_us()[1])
    show("store a block, from NATS", "{:.2f} us", lambda: asyncio.run(from_nats_us()), "3.3 us")
    memory = bytes_a_block()
    table.add_row(
        "memory a block",
        f"{min(memory):.0f}-{max(memory):.0f}, mean {statistics.mean(memory):.0f} B",
        "90 B",
        "55-77 B",
    )
    Console().print(table)


def ask_us(ask: Callable[[Sequence[int]], object], chains: Sequence[Sequence[int]]) -> float:
    """One question about 512 blocks."""
    queries = [list(map(int, map(str, chain))) for chain in chains]  # other objects, as from a message
    rounds = max(1, 1000 // len(queries))
    with cpu_us() as spent:
        for _ in range(rounds):
            for query in queries:
                ask(query)
    return spent() / (rounds * len(queries))


def ingest_us() -> tuple[float, float]:
    """(store, remove) a block, in events of 16."""
    index, chance = KvIndex(), random.Random(1)
    worker = index.open("worker")
    events = [event for _ in range(200) for event in as_events(chain(chance))]
    with cpu_us() as stored:
        for parent, hashes in events:
            index.store(worker, parent, hashes)
    with cpu_us() as removed:
        for _, hashes in reversed(events):
            index.remove(worker, reversed(hashes))
    assert len(index) == 0
    return stored() / (200 * BLOCKS), removed() / (200 * BLOCKS)


def store_shared_us() -> float:
    """Store a block that other workers hold already."""
    index, chance = KvIndex(), random.Random(2)
    holders = [index.open(str(number)) for number in range(64)]
    prompts = [as_events(chain(chance)) for _ in range(8)]
    with cpu_us() as spent:
        for holder in holders:
            for events in prompts:
                for parent, hashes in events:
                    index.store(holder, parent, hashes)
    return spent() / (64 * 8 * BLOCKS)


def bytes_a_block() -> list[float]:
    """What an index of one worker asks the allocator for, its keys included, between two growths of its dict."""
    chance = random.Random(4)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index, figures = KvIndex(), []
        worker = index.open("worker")
        while len(index) < MEMORY_BLOCKS[1]:
            for parent, hashes in as_events(chain(chance)):
                index.store(worker, parent, hashes)
            if len(index) >= MEMORY_BLOCKS[0]:
                figures.append((tracemalloc.get_traced_memory()[0] - before) / len(index))
        return figures
    finally:
        tracemalloc.stop()


async def from_nats_us() -> float:
    """Receive events over a real NATS and apply them: this process's CPU a block."""
    with tempfile.TemporaryDirectory() as folder:
        nats = EmbeddedNats.start(Path(folder))
        try:
            nats.wait_ready()
            bus = await Bus.connect(nats.endpoint, CollectorRegistry())
            follower = Follower(KvIndex(), "w", 1)
            follower.snapshot().finish(1, 0)
            arrived = asyncio.Event()
            spent = 0.0

            def on_events(subject: str, data: bytes) -> None:
                nonlocal spent
                follower.on_batch(kv_wire.batch_from_bytes(data))
                if follower.holder.count == NATS_BLOCKS:
                    spent += time.process_time()
                    arrived.set()

            await bus.subscribe("blocks", on_events, lambda: None)
            command = [sys.executable, __file__, "--publish-to", nats.endpoint]
            publisher = await asyncio.create_subprocess_exec(*command)
            spent -= time.process_time()
            async with asyncio.timeout(START_TIMEOUT_S):
                await arrived.wait()
            await publisher.wait()
            await bus.close()
            return 1e6 * spent / NATS_BLOCKS
        finally:
            nats.stop()


async def publish(nats: str) -> None:
    """The other end of `from_nats_us`: messages of eight events of 16 blocks, as a worker's publisher makes them."""
    bus, chance = await Bus.connect(nats, CollectorRegistry()), random.Random(7)
    events = [
        Stored(parent, hashes) for _ in range(NATS_BLOCKS // BLOCKS) for parent, hashes in as_events(chain(chance))
    ]
    for start in range(0, len(events), 8):
        batch = KvEventBatch("w", 1, start + 1, tuple(events[start : start + 8]))
        bus.publish("blocks", kv_wire.batch_to_bytes(batch))
        if start % 64 == 0:
            await asyncio.sleep(0)
    await bus.close()


def filled(workers: int, prompts: int, *, tiers: bool = False) -> tuple[KvIndex, list[list[int]]]:
    """An index in which workers hold the prompts to some depth, and the prompts; with tiers, all in host memory too."""
    chance = random.Random(6)
    index = KvIndex()
    holders = [index.open(f"worker-{number}") for number in range(workers)]
    chains = [chain(chance) for _ in range(prompts)]
    for hashes in chains:
        for holder in holders:
            depth = chance.choice(DEPTHS)
            index.store(holder, None, hashes[: 2 * depth // 3 if tiers else depth])
            if tiers:
                index.store(holder, None, hashes[:depth], Tier.HOST)
    return index, chains


def chain(chance: random.Random) -> list[int]:
    """The hashes of one prompt."""
    return [chance.getrandbits(64) for _ in range(BLOCKS)]


def as_events(hashes: Sequence[int]) -> list[tuple[int | None, tuple[int, ...]]]:
    """(parent, hashes) as an engine stores them, 16 at a time."""
    return [
        (hashes[start - 1] if start else None, tuple(hashes[start : start + EVENT_BLOCKS]))
        for start in range(0, len(hashes), EVENT_BLOCKS)
    ]


@contextmanager
def cpu_us() -> Iterator[Callable[[], float]]:
    """This process's CPU time in the block."""
    began, ended = time.process_time(), 0.0
    yield lambda: 1e6 * (ended - began)
    ended = time.process_time()


if __name__ == "__main__":
    main()
