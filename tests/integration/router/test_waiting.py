"""Requests that wait at a router until there is room."""

from __future__ import annotations

import asyncio

import grpc
import msgspec
import pytest

from controlplane.errors import DeadlineExceeded, Overloaded
from controlplane.grpc_errors import from_rpc_error
from engines.base import LoadSnapshot
from tests.integration.router.cluster import CARD, Cluster, RouterProcess, StartRouter, until
from tokenmill.router.v1 import router_pb2

ONE_AT_A_TIME = msgspec.structs.replace(CARD, max_num_seqs=1)
Call = grpc.aio.UnaryUnaryCall[router_pb2.ScheduleRequest, router_pb2.ScheduleResponse]


def ask(router: RouterProcess, request_id: str, *, priority: int = 0, timeout_s: float = 60) -> Call:
    request = router_pb2.ScheduleRequest(request_id=request_id, model="model", prompt_tokens=100, priority=priority)
    call: Call = router.stub.Schedule(request, timeout=timeout_s)
    return call


async def waits(router: RouterProcess, request_id: str) -> bool:
    answer = await router.stub.IsWaiting(router_pb2.IsWaitingRequest(request_id=request_id), timeout=60)
    return answer.waiting


async def freed(router: RouterProcess, request_id: str) -> None:
    outcome = router_pb2.Outcome(request_id=request_id, freed=router_pb2.Freed())
    await router.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]), timeout=60)


async def busy_router(cluster: Cluster, start_router: StartRouter, *flags: str) -> RouterProcess:
    """Whose one worker runs the request "running"."""
    router = await start_router(cluster, "--worker-backlog", "0", *flags)
    worker = await cluster.start("d-1", "decode", card=ONE_AT_A_TIME)
    await until(lambda: router.agrees_with(cluster), "the worker is known")
    await ask(router, "running")
    worker.load = LoadSnapshot(running_requests=1)
    return router


async def test_a_request_waits_until_something_is_freed_and_its_router_says_so(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await busy_router(cluster, start_router)
    call = ask(router, "late")
    await until(lambda: waits(router, "late"), "it waits")
    await freed(router, "running")
    placed = await asyncio.wait_for(call, 20)
    assert placed.decode.instance_id == "d-1"
    assert placed.queue_wait_ms > 0
    assert not await waits(router, "late")
    assert not await waits(router, "running")


async def test_a_cancelled_call_leaves_the_queue(cluster: Cluster, start_router: StartRouter) -> None:
    router = await busy_router(cluster, start_router, "--queue-max-requests", "1")
    gone = ask(router, "gone")
    await until(lambda: waits(router, "gone"), "it waits")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(router, "refused")
    error = from_rpc_error(refused.value)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    gone.cancel()

    async def left() -> bool:
        return not await waits(router, "gone")

    await until(left, "it left")
    call = ask(router, "next")
    await until(lambda: waits(router, "next"), "its place was free")
    call.cancel()


async def test_a_request_does_not_wait_longer_than_it_has(cluster: Cluster, start_router: StartRouter) -> None:
    router = await busy_router(cluster, start_router)
    request = router_pb2.ScheduleRequest(request_id="hasty", model="model", prompt_tokens=100, timeout_ms=100)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.stub.Schedule(request, timeout=60)
    assert isinstance(from_rpc_error(refused.value), DeadlineExceeded)


async def test_a_new_worker_takes_the_most_urgent(cluster: Cluster, start_router: StartRouter) -> None:
    router = await busy_router(cluster, start_router)
    calls = {name: ask(router, name, priority=priority) for name, priority in (("low", 0), ("high", 5))}
    for name in calls:
        await until(lambda name=name: waits(router, name), "it waits")
    await cluster.start("d-2", "decode", card=ONE_AT_A_TIME)  # it says that it is idle again and again
    high, low = await asyncio.wait_for(asyncio.gather(calls["high"], calls["low"]), 60)
    assert high.decode.instance_id == low.decode.instance_id == "d-2"
    assert high.queue_wait_ms < low.queue_wait_ms  # although it came later
