"""A router process's CPU time for a Schedule call of 512 block hashes, through gRPC.

    python benchmarks/bench_schedule.py [--runs N] [--calls N] [--at-once N] [--workers N,N]

CPU microseconds, median of the runs, of a real router process beside real etcd and NATS. Half the workers prefill, half
decode; each holds every prompt to one of six depths. They are records in discovery, and pictures that a few servers
give away.
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
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from controlplane.bus import Bus
from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd, EmbeddedNats
from controlplane.instances import Instance, ModelCard, State
from controlplane.kv_publisher import KvPublisher, KvSourceServicer
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from engines.base import Capability
from kvcache.events import Stored
from kvcache.format import KvFormat
from tokenmill.kv.v1 import kv_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

BLOCKS = 512
BLOCK_SIZE = 16
DEPTHS = (0, 100, 200, 300, 400, 512)
PICTURES = 16
START_TIMEOUT_S = 120.0
FORMAT = KvFormat("bench", "float32", BLOCK_SIZE, "flat", "bench", "1", "tp1-pp1")


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="the median of so many is shown [default %(default)s]")
    parser.add_argument("--calls", type=int, default=1000, help="calls a run [default %(default)s]")
    parser.add_argument("--at-once", type=int, default=16, help="calls in flight [default %(default)s]")
    parser.add_argument("--workers", default="64,1024", help="how many workers [default %(default)s]")
    arguments = parser.parse_args()
    configure_logging(CommonSettings(log_level="warning"), service="bench")
    how = f"{arguments.at_once} calls at a time, median of {arguments.runs}"
    table = Table(title=f"Schedule, 512 hashes, router's CPU time a call, {how}")
    for column in ("workers", "Schedule", "a call of that size that does nothing"):
        table.add_column(column, justify="right")
    for workers in map(int, arguments.workers.split(",")):
        schedule, floor = asyncio.run(schedule_us(workers, arguments.calls, arguments.runs, arguments.at_once))
        table.add_row(f"{workers:,}", f"{schedule:.0f} us", f"{floor:.0f} us")
    Console().print(table)


async def schedule_us(workers: int, calls: int, runs: int, at_once: int) -> tuple[float, float]:
    """The router process's CPU (a Schedule call, a call that does nothing); half its workers prefill, half decode."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = EmbeddedEtcd.start(folder / "etcd", durable=False)
        stack.callback(etcd.stop)
        nats = EmbeddedNats.start(folder / "nats")
        stack.callback(nats.stop)
        etcd.wait_ready()
        nats.wait_ready()
        discovery = await Discovery.connect(etcd.endpoint, "bench", CollectorRegistry(), timeout_s=START_TIMEOUT_S)
        stack.push_async_callback(discovery.close)
        chains = [chain(random.Random(seed)) for seed in range(50)]
        await start_workers(stack, discovery, nats.endpoint, workers, chains)
        async with asyncio.timeout(START_TIMEOUT_S):
            router = stack.enter_context(router_process(etcd.endpoint, nats.endpoint))
            address = await ready_router(discovery)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = router_pb2_grpc.RouterStub(channel)
        nothing = router_pb2.Outcome(request_id="x" * 8 * BLOCKS, freed=router_pb2.Freed())
        schedules, floors = [], []
        for run in range(runs + 1):
            before = cpu_s(router)
            requests = (schedule_request(chains[call % len(chains)], f"{run}-{call}") for call in range(calls))
            await side_by_side(at_once, (stub.Schedule(request) for request in requests))
            between = cpu_s(router)
            report = router_pb2.ReportRequest(outcomes=[nothing])
            await side_by_side(at_once, (stub.Report(report) for _ in range(calls)))
            schedules.append(1e6 * (between - before) / calls)
            floors.append(1e6 * (cpu_s(router) - between) / calls)
        return statistics.median(schedules[1:]), statistics.median(floors[1:])  # the first warms up


async def side_by_side(at_once: int, calls: Iterator[Awaitable[object]]) -> None:
    """Makes all calls, so many at a time, as frontends do."""

    async def one_after_the_other() -> None:
        for call in calls:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_the_other())


async def start_workers(
    stack: AsyncExitStack, discovery: Discovery, nats: str, workers: int, chains: Sequence[list[int]]
) -> None:
    """Their pictures to servers, their records to discovery."""
    chance = random.Random(5)
    bus = await Bus.connect(nats, CollectorRegistry())
    stack.push_async_callback(bus.close)
    addresses = []
    for number in range(PICTURES):
        publisher = KvPublisher(bus, "bench", f"picture-{number}", epoch=1)
        for hashes in chains:
            depth = chance.choice(DEPTHS)
            if depth:
                publisher.events([Stored(None, tuple(hashes[:depth]))])
        server = grpc.aio.server()
        kv_pb2_grpc.add_KvSourceServicer_to_server(KvSourceServicer(publisher), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        stack.push_async_callback(server.stop, 0)
    capabilities = (Capability.KV_EVENTS.value, Capability.HOLD_KV.value, Capability.REMOTE_PREFILL.value)
    card = ModelCard("bench", "builtin", FORMAT, 1 << 20, 1 << 20, 1 << 20, 256, 8192, capabilities=capabilities)
    for number in range(workers):
        role = "prefill" if number % 2 else "decode"
        address = addresses[number // 2 % PICTURES]
        await discovery.register(
            Instance(role, f"{role}-{number}", State.READY, 1, address, os.getpid(), "bench", "0", role, model=card)
        )


async def ready_router(discovery: Discovery) -> str:
    """Its address, once it is ready: then it knows what the workers hold."""
    changed = asyncio.Event()
    discovery.subscribe(changed.set)
    while True:
        routers = discovery.by_service("router")
        if routers and routers[0].state is State.READY:
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


def chain(chance: random.Random) -> list[int]:
    """The hashes of one prompt."""
    return [chance.getrandbits(64) for _ in range(BLOCKS)]


def cpu_s(process: psutil.Process) -> float:
    """CPU time a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
