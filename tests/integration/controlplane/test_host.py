from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd
from controlplane.instances import Instance, State

Until = Callable[..., Awaitable[float]]
STARTS_S = 60  # on a busy machine
STUB = Path(__file__).with_name("stub_service.py")


class Running:
    """A stub service in a process of its own, and how others see it."""

    def __init__(self, process: asyncio.subprocess.Process, discovery: Discovery) -> None:
        self.process = process
        self.seen: list[State] = []
        self._discovery = discovery
        discovery.subscribe(self._look)
        self._look()

    @property
    def instance(self) -> Instance | None:
        return self._discovery.instances.get("stub-1")

    def _look(self) -> None:
        if self.instance is not None and [self.instance.state] != self.seen[-1:]:
            self.seen.append(self.instance.state)

    def is_in(self, state: State) -> bool:
        return self.instance is not None and self.instance.state is state

    async def ended(self) -> tuple[int | None, str]:
        async with asyncio.timeout(STARTS_S):
            out, _ = await self.process.communicate()
        return self.process.returncode, out.decode()


@asynccontextmanager
async def running(mode: str, etcd: str, nats: str, deployment: str, *flags: str) -> AsyncIterator[Running]:
    discovery = await Discovery.connect(etcd, deployment, CollectorRegistry(), timeout_s=60)
    where = ("--etcd", etcd, "--nats", nats, "--deployment", deployment, "--instance-id", "stub-1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(STUB), mode, *where, *flags, stdout=subprocess.PIPE
    )
    try:
        yield Running(process, discovery)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await discovery.close()


async def test_it_starts_serves_drains_and_leaves(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("well", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        stub.process.send_signal(signal.SIGTERM)
        assert await stub.ended() == (0, "drain\nstop\n")
        await until(lambda: stub.instance is None)
        assert stub.seen == [State.STARTING, State.READY, State.DRAINING]


async def test_health_and_reflection_say_what_is_served(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("not-yet-able", etcd, nats, deployment) as stub:
        await until(lambda: stub.instance, STARTS_S)
        assert stub.instance is not None
        async with grpc.aio.insecure_channel(stub.instance.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "stub.v1.Stub"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            await until(lambda: stub.is_in(State.READY))
            for name in ("", "stub.v1.Stub"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            async for listed in reflection.ServerReflectionInfo(iter([question])):
                names = {service.name for service in listed.list_services_response.service}
            assert names == {
                "stub.v1.Stub", "tokenmill.control.v1.Control", "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }  # fmt: skip


async def test_metrics_are_served_and_tell_of_etcd_and_nats(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    async with running("well", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        assert stub.instance is not None
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{stub.instance.metrics_address}/metrics")).text
        for line in ("tokenmill_discovery_stale 0.0", "tokenmill_bus_connected 1.0", "process_cpu_seconds_total"):
            assert line in text


async def test_nothing_listens_beyond_the_loopback_address(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("well", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        connections = psutil.Process(stub.process.pid).net_connections("inet")
        listening = [connection.laddr for connection in connections if connection.status == "LISTEN"]
        assert len(listening) == 2
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


async def test_calls_under_way_are_answered_when_it_stops(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("well", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        assert stub.instance is not None
        async with grpc.aio.insecure_channel(stub.instance.address) as channel:
            call = channel.unary_unary("/stub.v1.Stub/Wait")(b"0.5")
            await call.wait_for_connection()
            stub.process.send_signal(signal.SIGTERM)
            assert await call == b"done"


@pytest.mark.parametrize(
    ("mode", "code", "reason"),
    [
        ("bad-settings", 2, "no such model"),
        ("crash", 1, "RuntimeError: out of memory"),
        ("dies", 1, "the engine died"),
        ("task-breaks", 1, "a task broke: ValueError: broken task"),
    ],
)
async def test_a_failure_is_published_with_its_reason_and_ends_the_process(
    mode: str, code: int, reason: str, etcd: str, nats: str, deployment: str, until: Until
) -> None:
    async with running(mode, etcd, nats, deployment) as stub:
        assert await stub.ended() == (code, "stop\n")
        await until(lambda: stub.is_in(State.FAILED))
        assert stub.instance is not None
        assert stub.instance.progress == reason


async def test_a_second_signal_cuts_the_drain_short(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("drain-for-ever", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        stub.process.send_signal(signal.SIGINT)
        await until(lambda: stub.is_in(State.DRAINING))
        stub.process.send_signal(signal.SIGINT)
        code, said = await stub.ended()
        # DRAINING is public before the service is told to drain; the signal may fall between the two.
        assert (code, said.removeprefix("drain\n")) == (130, "stop\n")
        await until(lambda: stub.instance is None)


async def test_a_drain_ends_with_its_time(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("drain-for-ever", etcd, nats, deployment, "--drain-timeout-s", "0.1") as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        stub.process.send_signal(signal.SIGTERM)
        assert (await stub.ended())[0] == 0


async def test_a_signal_while_it_loads_stops_it_at_once(etcd: str, nats: str, deployment: str, until: Until) -> None:
    async with running("load-for-ever", etcd, nats, deployment) as stub:
        await until(lambda: stub.instance and stub.instance.progress == "loading weights", STARTS_S)
        stub.process.send_signal(signal.SIGTERM)
        assert await stub.ended() == (0, "stop\n")


async def test_it_waits_for_an_etcd_that_comes_later_and_needs_no_nats_to_start(
    own_etcd: EmbeddedEtcd, deployment: str, until: Until
) -> None:
    async with running("well", own_etcd.endpoint, "nats://127.0.0.1:1", deployment) as stub:
        own_etcd.kill()
        await asyncio.sleep(0.5)
        assert stub.process.returncode is None
        own_etcd.restart()
        await until(lambda: stub.is_in(State.READY), STARTS_S)


async def test_a_port_in_use_ends_it_with_a_message(etcd: str, nats: str, deployment: str) -> None:
    port = etcd.rsplit(":", 1)[1]
    for flag in ("--grpc-port", "--metrics-port"):
        async with running("well", etcd, nats, deployment, flag, port) as stub:
            assert (await stub.ended())[0] == 2


async def test_a_healthy_service_that_stood_still_for_a_while_is_ready_again(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    async with running("well", etcd, nats, deployment) as stub:
        await until(lambda: stub.is_in(State.READY), STARTS_S)
        stub.process.send_signal(signal.SIGSTOP)
        await until(lambda: stub.is_in(State.SUSPECT), 60)
        stub.process.send_signal(signal.SIGCONT)
        await until(lambda: stub.is_in(State.READY), 60)
        assert stub.process.returncode is None
