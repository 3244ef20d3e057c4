"""A fleet of light workers in two processes, against a real router, etcd and NATS."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.instances import State
from tests.integration.router.cluster import Cluster, RouterProcess, StartRouter, until

WORKERS = 20
"""In each process."""
PATIENCE_S = 120.0


@asynccontextmanager
async def fleet_process(cluster: Cluster, name: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    flags = {
        "etcd": cluster.etcd, "nats": cluster.nats, "deployment": cluster.deployment, "instance-id": name,
        "engine": "sim", "sim-kv-bytes-per-block": "0", "sim-total-blocks": "2048", "time-scale": "0",
        "workers-per-process": str(WORKERS), "prompts-per-s": "1", "log-format": "json",
    }  # fmt: skip
    command = [sys.executable, "-m", "services.fleet", *(part for flag in flags.items() for part in _flag(*flag))]
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _flag(name: str, value: str) -> tuple[str, str]:
    return f"--{name}", value


async def knows_all(router: RouterProcess, count: int) -> bool:
    """Whether it follows so many workers, each in step and with blocks."""
    index = await router.index()
    return len(index) == count and all(one.hashes and not one.stale for one in index.values())


async def test_a_router_sees_each_worker_of_a_fleet_and_so_does_the_one_after_it(
    cluster: Cluster, start_router: StartRouter, tmp_path: Path
) -> None:
    router = await start_router(cluster)
    async with fleet_process(cluster, "f-1", tmp_path) as one, fleet_process(cluster, "f-2", tmp_path):
        await until(lambda: knows_all(router, 2 * WORKERS), "all send events", within_s=PATIENCE_S)
        places = {(await router.schedule(model="sim", request_id=f"r-{n}")).decode.address for n in range(8)}
        assert len(places) > 1
        await router.kill()
        successor = await start_router(cluster)
        await until(lambda: knows_all(successor, 2 * WORKERS), "the next one has it all", within_s=PATIENCE_S)
        one.send_signal(signal.SIGTERM)
        await until(lambda: knows_all(successor, WORKERS), "those that said farewell are gone", within_s=PATIENCE_S)
        assert await one.wait() == 0


async def test_a_fleet_that_is_killed_goes_quiet_as_a_whole(cluster: Cluster, tmp_path: Path) -> None:
    discovery = await Discovery.connect(cluster.etcd, cluster.deployment, CollectorRegistry(), timeout_s=60)

    def states() -> set[State]:
        return {instance.state for instance in discovery.by_service("decode")}

    try:
        async with fleet_process(cluster, "f-1", tmp_path) as process:
            await until(lambda: len(discovery.by_service("decode")) == WORKERS, "all are there", within_s=PATIENCE_S)
            await until(lambda: states() == {State.READY}, "all are ready", within_s=PATIENCE_S)
            process.kill()
            await until(lambda: states() <= {State.SUSPECT} != set(), "all are suspected", within_s=PATIENCE_S)
    finally:
        await discovery.close()
