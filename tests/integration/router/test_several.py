"""Several routers of one deployment."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

import pytest

from engines.base import LoadSnapshot
from tests.integration.router.cluster import Cluster, RouterProcess, StartRouter, until
from tokenmill.router.v1 import router_pb2

WORKERS = tuple(f"d-{at}" for at in range(4))


async def placements(router: RouterProcess) -> dict[str, float]:
    """Requests that it believes each worker has."""
    request = router_pb2.ScheduleRequest(request_id="probe", model="model", prompt_tokens=16)
    seen = await router.stub.Schedule(request, timeout=60, metadata=(("tokenmill-explain", "1"),))
    await told(router, "probe", freed=router_pb2.Freed())
    return {one.instance_id: one.terms["requests"] for one in seen.candidates}


async def told(router: RouterProcess, request_id: str, *, freed: router_pb2.Freed) -> None:
    outcome = router_pb2.Outcome(request_id=request_id, freed=freed)
    await router.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]), timeout=60)


@pytest.fixture
async def routers(cluster: Cluster, start_router: StartRouter) -> list[RouterProcess]:
    """Two, before workers whose load nobody but they can know: they report none."""
    for name in WORKERS:
        worker = await cluster.start(name, "decode")
        worker.publisher.load_report = lambda load: None  # type: ignore[method-assign]
    both = await asyncio.gather(*(start_router(cluster, instance_id=f"router-{at}") for at in (1, 2)))
    for router in both:
        await until(lambda router=router: router.agrees_with(cluster), "the workers are known")
    return list(both)


async def test_placements_and_their_ends_are_known_to_the_other_router(
    routers: list[RouterProcess],
) -> None:
    one, other = routers
    for at in range(8):
        await one.schedule(request_id=str(at))

    async def knows(requests: int) -> bool:
        return sum((await placements(other)).values()) == requests

    await until(lambda: knows(8), "the other knows them")
    for at in range(8):
        await told(one, str(at), freed=router_pb2.Freed())
    await until(lambda: knows(0), "the other knows that they ended")


async def test_two_routers_spread_one_load_evenly(routers: list[RouterProcess]) -> None:
    chance, placed = random.Random(5), Counter[str]()
    for turn in range(80):
        prompt = [chance.getrandbits(64) for _ in range(8)]
        answer = await routers[turn % 2].schedule(prompt, request_id=f"r-{turn}", tokens=8 * 16)
        placed[answer.decode.instance_id] += answer.uncached_tokens

        async def both_know(requests: int = turn + 1) -> bool:
            return all([sum((await placements(one)).values()) == requests for one in routers])

        await until(both_know, "the other has heard of it")
    assert max(placed.values()) <= 1.1 * sum(placed.values()) / len(WORKERS)


async def test_placements_of_a_router_that_went_are_forgotten(routers: list[RouterProcess]) -> None:
    one, other = routers
    for at in range(8):
        await one.schedule(request_id=str(at))

    async def knows(requests: int) -> bool:
        return sum((await placements(other)).values()) == requests

    await until(lambda: knows(8), "the other knows them")
    one.process.send_signal(signal.SIGTERM)
    await until(lambda: knows(0), "the other forgot them", within_s=60)


async def test_a_router_that_starts_late_learns_the_load_from_its_workers(
    cluster: Cluster, start_router: StartRouter
) -> None:
    worker = await cluster.start("d-1", "decode")
    worker.load = LoadSnapshot(running_requests=7)
    router = await start_router(cluster)

    async def knows() -> bool:
        return (await placements(router)).get("d-1") == 7

    await until(knows, "it has the load report")
