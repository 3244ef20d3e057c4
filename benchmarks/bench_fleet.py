"""What a fleet costs those that must know all of it: a router, etcd and NATS, with hundreds of light workers.

    storm      all workers register at once; until the router has a snapshot of each
    steady     KV events, load reports and renewed leases of all; and what a decision takes meanwhile
    restart    the router is killed and another started; until it has a snapshot of each worker

CPU and memory are what the kernel says of each process. Workers share the machine with what is measured: on a busy one
times mean little, CPU seconds much.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd, EmbeddedNats
from controlplane.instances import Instance, State
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

PATIENCE_S = 300.0
PROMPT_BLOCKS = 48
SCHEDULES = 500


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--prompts-per-s", type=float, default=0.1, help="of each worker [default %(default)s]")
    parser.add_argument("--steady-s", type=float, default=20.0)
    asyncio.run(measure(parser.parse_args()))


@dataclass
class Usage:
    """CPU seconds and MiB of one process and its children."""

    cpu_s: float
    rss_mib: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """So far."""
        every = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        times = [one.cpu_times() for one in every]
        return cls(sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in every) / 2**20)


class Bench:
    """The processes, and the picture that etcd gives of them."""

    def __init__(self, options: argparse.Namespace, folder: Path, etcd: EmbeddedEtcd, nats: EmbeddedNats) -> None:
        self.options = options
        self.folder = folder
        self.common = [
            "--etcd", etcd.endpoint, "--nats", nats.endpoint, "--deployment", f"fleet-{uuid.uuid4().hex[:6]}",
            "--log-format", "json", "--log-level", "warning",
        ]  # fmt: skip
        self.discovery: Discovery
        self.servers = psutil.Process(os.getpid()).children()

    @contextmanager
    def service(self, name: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        """A service's process, killed in the end."""
        command = [sys.executable, "-m", f"services.{name}", *self.common, *flags]
        with (self.folder / f"{name}-{time.monotonic_ns()}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def router(self, process: subprocess.Popen[bytes]) -> Instance:
        """The record of a router's process, once it is READY."""
        while True:
            for one in self.discovery.by_service("router"):
                if one.pid == process.pid and one.state is State.READY:
                    return one
            await asyncio.sleep(0.01)

    async def all_followed(self, router: Instance) -> None:
        """Until a router has a snapshot of every worker."""
        while True:
            seen = await asyncio.to_thread(metrics, router)
            if seen.get("tokenmill_router_snapshots_total", 0) >= self.options.workers and not seen.get(
                "tokenmill_router_stale_workers", 1
            ):
                return
            await asyncio.sleep(0.05)

    async def all_ready(self) -> None:
        """Until every worker is READY in etcd."""
        while True:
            ready = sum(one.state is State.READY for one in self.discovery.by_service("decode"))
            if ready == self.options.workers:
                return
            await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace) -> None:
    """Runs all three parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        etcd, nats = EmbeddedEtcd.start(folder), EmbeddedNats.start(folder)
        try:
            etcd.wait_ready()
            nats.wait_ready()
            bench = Bench(options, folder, etcd, nats)
            bench.discovery = await Discovery.connect(etcd.endpoint, bench.common[5], CollectorRegistry(), timeout_s=30)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await run(bench)
            finally:
                await bench.discovery.close()
        finally:
            nats.stop()
            etcd.stop()


async def run(bench: Bench) -> None:
    """The three parts, and the table."""
    options = bench.options
    rows: list[tuple[str, str]] = []
    fleet = (
        "--engine", "sim", "--sim-kv-bytes-per-block", "0", "--prompts-per-s", str(options.prompts_per_s),
        "--workers-per-process", str(options.workers // options.processes),
    )  # fmt: skip
    options.workers = options.workers // options.processes * options.processes
    with bench.service("router") as process:
        router = await bench.router(process)
        before = Usage.of(process.pid)
        began = time.monotonic()
        fleets = [bench.service("fleet", *fleet) for _ in range(options.processes)]
        pids = [one.__enter__().pid for one in fleets]
        try:
            await bench.all_ready()
            registered_s = time.monotonic() - began
            await bench.all_followed(router)
            followed_s = time.monotonic() - began
            after = Usage.of(process.pid)
            rows.append(("storm: all registered, s", f"{registered_s:.1f}"))
            rows.append(("storm: router has all snapshots, s", f"{followed_s:.1f}"))
            rows.append(("storm: router's CPU, s", f"{after.cpu_s - before.cpu_s:.2f}"))
            rows += await steady(bench, process.pid, pids, router)
            process.kill()
            process.wait()
            began = time.monotonic()
            with bench.service("router") as successor:
                again = await bench.router(successor)
                ready_s = time.monotonic() - began
                await bench.all_followed(again)
                rows.append(("restart: router READY after, s", f"{ready_s:.1f}"))
                rows.append(("restart: all snapshots after, s", f"{time.monotonic() - began:.1f}"))
                rows.append(("restart: router's CPU, s", f"{Usage.of(successor.pid).cpu_s:.2f}"))
                blocks = (await asyncio.to_thread(metrics, again))["tokenmill_router_index_blocks"]
                rows.append(("restart: blocks in the index", f"{blocks:,.0f}"))
        finally:
            for one in fleets:
                one.__exit__(None, None, None)
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    table.title = (
        f"{options.workers} workers in {options.processes} processes, {options.prompts_per_s:g} prompts/s each"
    )
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)


async def steady(bench: Bench, router_pid: int, fleet_pids: list[int], router: Instance) -> list[tuple[str, str]]:
    """CPU and memory while nothing changes, and the time of decisions."""
    pids = {"router": [router_pid], "fleet": fleet_pids} | {one.name(): [one.pid] for one in bench.servers}
    before = {name: [Usage.of(pid) for pid in those] for name, those in pids.items()}
    began = time.monotonic()
    await asyncio.sleep(bench.options.steady_s)
    spent = time.monotonic() - began
    rows = []
    for name, those in pids.items():
        after = [Usage.of(pid) for pid in those]
        cpu = sum(now.cpu_s - then.cpu_s for now, then in zip(after, before[name], strict=True)) / spent
        rows.append((f"steady: {name}, CPU cores", f"{cpu:.2f}"))
        rows.append((f"steady: {name}, MiB", f"{sum(one.rss_mib for one in after):,.0f}"))
    blocks = (await asyncio.to_thread(metrics, router))["tokenmill_router_index_blocks"]
    rows.append(("steady: blocks in the index", f"{blocks:,.0f}"))
    took = await schedules(router)
    rows.append(("Schedule, p50 ms", f"{1e3 * took[len(took) // 2]:.2f}"))
    rows.append(("Schedule, p99 ms", f"{1e3 * took[len(took) * 99 // 100]:.2f}"))
    return rows


async def schedules(router: Instance) -> list[float]:
    """Seconds that decisions took one after the other, sorted."""
    chance = random.Random(0)
    took = []
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for number in range(SCHEDULES):
            request = router_pb2.ScheduleRequest(
                request_id=f"bench-{number}",
                model="sim",
                block_hashes=[chance.getrandbits(64) for _ in range(PROMPT_BLOCKS)],
                prompt_tokens=PROMPT_BLOCKS * 16,
            )
            began = time.perf_counter()
            await stub.Schedule(request, timeout=10)
            took.append(time.perf_counter() - began)
    return sorted(took)


def metrics(instance: Instance) -> dict[str, float]:
    """Every metric by its name, summed over labels, but failures."""
    with urllib.request.urlopen(f"http://{instance.metrics_address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("result") != "failed":
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


if __name__ == "__main__":
    main()
