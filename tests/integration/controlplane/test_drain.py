"""Drain, Undrain and Status of one service process, and what its routers have to do with it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.errors import InvalidRequest, NotFound
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import Instance, State
from tests.integration.controlplane.test_host import STARTS_S, Running, running
from tokenmill.control.v1 import control_pb2, control_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

Until = Callable[..., Awaitable[float]]


@asynccontextmanager
async def controlled(stub: Running, until: Until) -> AsyncIterator[control_pb2_grpc.ControlStub]:
    """Calls to a stub service that is ready."""
    await until(lambda: stub.is_in(State.READY), STARTS_S)
    assert stub.instance is not None
    async with grpc.aio.insecure_channel(stub.instance.address) as channel:
        yield control_pb2_grpc.ControlStub(channel)


def drain(timeout_s: float | None = None, instance_id: str = "stub-1") -> control_pb2.DrainRequest:
    timeout_ms = None if timeout_s is None else round(timeout_s * 1000)
    return control_pb2.DrainRequest(instance_id=instance_id, timeout_ms=timeout_ms)


async def test_a_drain_is_public_when_it_is_answered_and_ends_the_process(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    async with running("drain-for-ever", etcd, nats, deployment) as stub, controlled(stub, until) as control:
        answer = await control.Drain(drain(20), timeout=30)
        assert 0 < answer.timeout_ms <= 20_000
        await until(lambda: stub.is_in(State.DRAINING))
        status = await control.Status(control_pb2.StatusRequest(instance_id="stub-1"), timeout=30)
        assert (status.state, status.unfinished) == ("draining", 7)
        assert 0 < status.timeout_ms <= 20_000
        await control.Drain(drain(0.1), timeout=30)  # it gets another time
        assert await stub.ended() == (0, "drain\ndrain\nstop\n")
        await until(lambda: stub.instance is None)


async def test_a_drain_that_was_taken_back_leads_to_ready_and_can_be_asked_for_again(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    undrain = control_pb2.UndrainRequest(instance_id="stub-1")
    async with running("drain-for-ever", etcd, nats, deployment) as stub, controlled(stub, until) as control:
        await control.Undrain(undrain, timeout=30)  # nothing to take back
        for _ in range(2):
            await control.Drain(drain(), timeout=30)
            await until(lambda: stub.is_in(State.DRAINING))
            await control.Undrain(undrain, timeout=30)
            await until(lambda: stub.is_in(State.READY))
        stub.process.send_signal(signal.SIGTERM)
        await until(lambda: stub.is_in(State.DRAINING))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.Undrain(undrain, timeout=30)
        assert isinstance(from_rpc_error(refused.value), InvalidRequest), "a signal means it"
        stub.process.send_signal(signal.SIGTERM)
        assert await stub.ended() == (130, "drain\nresume\n" * 2 + "drain\nstop\n")


async def test_a_signal_ends_a_drain_no_later_than_was_asked(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    flags = ("--drain-timeout-s", "0.2")
    async with running("drain-for-ever", etcd, nats, deployment, *flags) as stub, controlled(stub, until) as control:
        await control.Drain(drain(3000), timeout=30)
        stub.process.send_signal(signal.SIGTERM)
        assert (await stub.ended())[0] == 0


async def test_one_who_is_in_no_hurry_says_so_with_sigquit(etcd: str, nats: str, deployment: str, until: Until) -> None:
    flags = ("--drain-timeout-s", "0.1")
    async with running("drain-for-ever", etcd, nats, deployment, *flags) as stub, controlled(stub, until) as control:
        stub.process.send_signal(signal.SIGQUIT)
        await until(lambda: stub.is_in(State.DRAINING))
        status = await control.Status(control_pb2.StatusRequest(instance_id="stub-1"), timeout=30)
        assert status.timeout_ms > 3_600_000
        stub.process.send_signal(signal.SIGTERM)  # somebody is
        assert (await stub.ended())[0] == 0


async def test_a_drain_meant_for_another_instance_is_refused(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    async with running("well", etcd, nats, deployment) as stub, controlled(stub, until) as control:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.Drain(drain(instance_id="stub-0"), timeout=30)
        error = from_rpc_error(refused.value)
        assert isinstance(error, NotFound)
        assert "stub-1" in error.message
        assert stub.is_in(State.READY)


class SlowRouter(router_pb2_grpc.RouterServicer):
    """Confirms a drain when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.may_confirm = asyncio.Event()

    async def ConfirmDraining(  # noqa: N802
        self, request: router_pb2.ConfirmDrainingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ConfirmDrainingResponse:
        self.asked.append((request.instance_id, request.epoch))
        await self.may_confirm.wait()
        return router_pb2.ConfirmDrainingResponse()


@asynccontextmanager
async def published(router: SlowRouter, instance_id: str, etcd: str, deployment: str) -> AsyncIterator[None]:
    """A router that others find."""
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    discovery = await Discovery.connect(etcd, deployment, CollectorRegistry(), timeout_s=60)
    address = f"127.0.0.1:{port}"
    await discovery.register(
        Instance("router", instance_id, State.READY, time.time_ns(), address, pid=1, host="test", version="0")
    )
    try:
        yield
    finally:
        await discovery.close()
        await server.stop(0)


async def test_a_workers_routers_confirm_its_drain_and_one_that_does_not_is_not_waited_for(
    etcd: str, nats: str, deployment: str, until: Until
) -> None:
    prompt, hung = SlowRouter(), SlowRouter()
    prompt.may_confirm.set()
    async with (
        published(prompt, "router-1", etcd, deployment),
        published(hung, "router-2", etcd, deployment),
        running("worker", etcd, nats, deployment) as stub,
        controlled(stub, until) as control,
    ):
        assert stub.instance is not None
        epoch = stub.instance.epoch
        await control.Drain(drain(), timeout=30)
        assert prompt.asked == hung.asked == [("stub-1", epoch)]
        assert await stub.ended() == (0, "drain\nstop\n")
