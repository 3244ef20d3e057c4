"""The router's index and decisions: match, ingest, memory, and the CPU of a Schedule call through gRPC.

    python benchmarks/bench_index.py [--runs N] [--calls N]

CPU microseconds, median of the runs. A prompt has 512 blocks (8,192 tokens of 16); workers hold it to five different
depths. The Schedule figure is that of a real router process beside real etcd and NATS, with workers that publish.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from controlplane import kv_wire
from controlplane.bus import Bus
from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd, EmbeddedNats
from controlplane.instances import Instance, ModelCard, State
from controlplane.kv_publisher import KvPublisher, KvSourceServicer
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from kvcache.events import KvEventBatch, Stored
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from tokenmill.kv.v1 import kv_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

BLOCKS = 512
BLOCK_SIZE = 16
DEPTHS = (0, 100, 200, 300, 400, 512)
EVENT_BLOCKS = 16
START_TIMEOUT_S = 60.0
FORMAT = KvFormat("bench", "float32", BLOCK_SIZE, "flat", "bench", "1", "tp1-pp1")


def main() -> None:
    """Measures everything and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="the median of so many is shown [default %(default)s]")
    parser.add_argument("--calls", type=int, default=2000, help="Schedule calls a run [default %(default)s]")
    arguments = parser.parse_args()
    configure_logging(CommonSettings(log_level="warning"), service="bench")

    table = Table(title=f"Router index, CPU time, median of {arguments.runs}")
    table.add_column("what")
    table.add_column("figure", justify="right")

    def show(what: str, form: str, measure: Callable[[], float]) -> None:
        table.add_row(what, form.format(statistics.median(measure() for _ in range(arguments.runs))))

    for workers, prompts in ((64, 200), (1024, 20)):
        index, chains = filled(workers, prompts)
        show(
            f"match, {workers:,} workers, one prompt again and again",
            "{:.1f} us",
            partial(ask_us, index.match, chains[:1]),
        )
        show(
            f"match, {workers:,} workers, {len(index):,} blocks in turn",
            "{:.1f} us",
            partial(ask_us, index.match, chains),
        )
        show(f"match, {workers:,} workers, by their names", "{:.1f} us", partial(ask_us, index.overlaps, chains[:1]))
    show("match, nobody has the first block", "{:.2f} us", partial(ask_us, index.match, [chain(random.Random(0))]))
    show("store a block", "{:.2f} us", lambda: ingest_us()[0])
    show("store a block others hold, 64 workers", "{:.2f} us", store_shared_us)
    show("remove a block", "{:.2f} us", lambda: ingest_us()[1])
    show("an event of 16 blocks, from bytes into the index", "{:.1f} us", event_us)
    show("memory a block", "{:.0f} B", bytes_a_block)
    for workers in (8, 64):
        schedule, floor = asyncio.run(schedule_us(workers, arguments.calls, arguments.runs))
        table.add_row(f"Schedule through gRPC, {workers} workers, 512 hashes", f"{schedule:.0f} us")
        table.add_row("  a call of that size that does nothing", f"{floor:.0f} us")
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


def event_us() -> float:
    """Parse a message of one event and apply it."""
    index, chance = KvIndex(), random.Random(3)
    worker = index.open("worker")
    events = [event for _ in range(100) for event in as_events(chain(chance))]
    messages = [
        kv_wire.batch_to_bytes(KvEventBatch("worker", 1, seq, (Stored(parent, hashes),)))
        for seq, (parent, hashes) in enumerate(events)
    ]
    with cpu_us() as spent:
        for message in messages:
            for event in kv_wire.batch_from_bytes(message).events:
                index.apply(worker, event)
    return spent() / len(messages)


def bytes_a_block() -> float:
    """What the allocator gave for an index of 200,000 blocks, its keys included."""
    chance = random.Random(4)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = KvIndex()
        worker = index.open("worker")
        for _ in range(400):
            for parent, hashes in as_events(chain(chance)):
                index.store(worker, parent, hashes)
        return (tracemalloc.get_traced_memory()[0] - before) / len(index)
    finally:
        tracemalloc.stop()


async def schedule_us(workers: int, calls: int, runs: int) -> tuple[float, float]:
    """The router process's CPU (a Schedule call, a call that does nothing); half its workers prefill, half decode."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = EmbeddedEtcd.start(folder / "etcd", durable=False)
        stack.callback(etcd.stop)
        nats = EmbeddedNats.start(folder / "nats")
        stack.callback(nats.stop)
        etcd.wait_ready()
        nats.wait_ready()
        router = stack.enter_context(router_process(etcd.endpoint, nats.endpoint))
        discovery = await Discovery.connect(etcd.endpoint, "bench", CollectorRegistry(), timeout_s=START_TIMEOUT_S)
        stack.push_async_callback(discovery.close)
        chains = [chain(random.Random(seed)) for seed in range(50)]
        await start_workers(stack, etcd.endpoint, nats.endpoint, workers, chains)
        address = await ready_router(discovery, workers)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = router_pb2_grpc.RouterStub(channel)
        nothing = router_pb2.Outcome(request_id="x" * 8 * BLOCKS, freed=router_pb2.Freed())
        schedules, floors = [], []
        for run in range(runs + 1):
            before = cpu_s(router)
            for call in range(calls):
                await stub.Schedule(schedule_request(chains[call % len(chains)], f"{run}-{call}"))
            between = cpu_s(router)
            for _ in range(calls):
                await stub.Report(router_pb2.ReportRequest(outcomes=[nothing]))
            schedules.append(1e6 * (between - before) / calls)
            floors.append(1e6 * (cpu_s(router) - between) / calls)
        return statistics.median(schedules[1:]), statistics.median(floors[1:])  # the first warms up


async def start_workers(stack: AsyncExitStack, etcd: str, nats: str, workers: int, chains: Sequence[list[int]]) -> None:
    """Workers to discovery and the bus; each holds the prompts to some depth."""
    chance = random.Random(5)
    bus = await Bus.connect(nats, CollectorRegistry())
    stack.push_async_callback(bus.close)
    for number in range(workers):
        role = "prefill" if number % 2 else "decode"
        instance_id = f"{role}-{number}"
        publisher = KvPublisher(bus, "bench", instance_id, epoch=1)
        server = grpc.aio.server()
        kv_pb2_grpc.add_KvSourceServicer_to_server(KvSourceServicer(publisher), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        for hashes in chains:
            depth = chance.choice(DEPTHS)
            if depth:
                publisher.events([Stored(None, tuple(hashes[:depth]))])
        card = ModelCard("bench", "builtin", FORMAT, 1 << 20, 1 << 20, 1 << 20, 256, 8192)
        discovery = await Discovery.connect(etcd, "bench", CollectorRegistry(), timeout_s=START_TIMEOUT_S)
        stack.push_async_callback(discovery.close)
        await discovery.register(
            Instance(role, instance_id, State.READY, 1, address, os.getpid(), "bench", "0", role, model=card)
        )


async def ready_router(discovery: Discovery, workers: int) -> str:
    """Its address, once everyone is there."""
    changed = asyncio.Event()
    discovery.subscribe(changed.set)
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            routers = discovery.by_service("router")
            if routers and routers[0].state is State.READY and len(discovery.instances) == workers + 1:
                return routers[0].address
            await changed.wait()
            changed.clear()


@contextmanager
def router_process(etcd: str, nats: str) -> Iterator[psutil.Process]:
    """A router of its own."""
    command = [sys.executable, "-m", "services.router", "--deployment", "bench", "--log-level", "warning"]
    process = subprocess.Popen([*command, "--etcd", etcd, "--nats", nats])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def schedule_request(hashes: list[int], request_id: str) -> router_pb2.ScheduleRequest:
    """One of the bench's prompts."""
    return router_pb2.ScheduleRequest(
        request_id=request_id, model="bench", block_hashes=hashes, prompt_tokens=BLOCKS * BLOCK_SIZE + 5, max_tokens=128
    )


def filled(workers: int, prompts: int) -> tuple[KvIndex, list[list[int]]]:
    """An index in which workers hold the prompts to some depth, and the prompts."""
    chance = random.Random(6)
    index = KvIndex()
    holders = [index.open(f"worker-{number}") for number in range(workers)]
    chains = [chain(chance) for _ in range(prompts)]
    for hashes in chains:
        for holder in holders:
            index.store(holder, None, hashes[: chance.choice(DEPTHS)])
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


def cpu_s(process: psutil.Process) -> float:
    """CPU time a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
