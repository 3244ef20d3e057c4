"""A cluster of light workers, and routers to follow it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.instances import State
from tests.integration.router.cluster import Cluster, RouterProcess, StartRouter, until


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def cluster(etcd: str, nats: str, deployment: str, stack: AsyncExitStack) -> Cluster:
    return Cluster(etcd, nats, deployment, stack)


@pytest.fixture
async def start_router(stack: AsyncExitStack, tmp_path: Path) -> StartRouter:
    async def start(cluster: Cluster, *flags: str, instance_id: str = "router-1") -> RouterProcess:
        log = tmp_path / f"{instance_id}-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.router",
                "--etcd", cluster.etcd, "--nats", cluster.nats, "--deployment", cluster.deployment,
                "--instance-id", instance_id, "--log-format", "json", *flags,
                stdout=output, stderr=output,
            )  # fmt: skip
        stack.push_async_callback(_stop, process)
        registry = CollectorRegistry()
        discovery = await Discovery.connect(cluster.etcd, cluster.deployment, registry, timeout_s=60)
        try:

            def ready() -> bool:
                instance = discovery.instances.get(instance_id)
                return instance is not None and instance.pid == process.pid and instance.state is State.READY

            await until(ready, "the router is ready", within_s=120)
            router = discovery.instances[instance_id]
        finally:
            await discovery.close()
        channel = grpc.aio.insecure_channel(router.address)
        stack.push_async_callback(channel.close)
        return RouterProcess(process, channel, router.address, router.metrics_address, log)

    return start


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
