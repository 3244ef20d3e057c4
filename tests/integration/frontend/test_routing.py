"""What a frontend asks of routers: in turn, with all that the client said, and with patience for one that queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest

from services.frontend.routing import Routing
from tests.integration.frontend.peers import (
    Context,
    Frontend,
    Live,
    ScriptedDecode,
    ScriptedRouter,
    ids,
    routing,
    running_frontend,
    serving,
    until,
)
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc
from tokenmill.router.v1 import router_pb2


class QueueingRouter(ScriptedRouter):
    """Holds a request back until it is told to go on, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.waiting: set[str] = set()
        self.left = 0
        """Calls that were cancelled while they waited."""

    async def Schedule(  # noqa: N802
        self, request: router_pb2.ScheduleRequest, context: Context
    ) -> router_pb2.ScheduleResponse:
        self.waiting.add(request.request_id)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.waiting.discard(request.request_id)
        return await super().Schedule(request, context)

    async def IsWaiting(  # noqa: N802
        self, request: router_pb2.IsWaitingRequest, context: Context
    ) -> router_pb2.IsWaitingResponse:
        return router_pb2.IsWaitingResponse(waiting=request.request_id in self.waiting)


@pytest.fixture(scope="module")
def frontend(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """One of its own: the routers here are for all its models."""
    flags = ("--schedule-timeout-s", "2")
    with running_frontend(etcd, nats, tmp_path_factory.mktemp("frontend") / "log", *flags) as running:
        yield running


@pytest.fixture
async def router(frontend: Frontend) -> AsyncIterator[QueueingRouter]:
    async with routing(frontend, QueueingRouter()) as router:
        assert isinstance(router, QueueingRouter)
        yield router


async def answer(live: Live) -> None:
    live.send("fine")
    live.finish(tokens=len(ids("fine")))


def asks(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the one and the other"} | fields


async def blind(http: httpx.AsyncClient) -> str:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(line for line in lines if line.startswith("tokenmill_schedule_blind_total"))


async def test_a_router_that_holds_a_request_back_is_waited_for(
    router: QueueingRouter, frontend: Frontend, http: httpx.AsyncClient
) -> None:
    before = await blind(http)
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.targets = [worker]
        router.go_on.clear()
        asked = asyncio.create_task(http.post("/v1/completions", json=asks(worker.model)))
        await until(lambda: router.waiting)
        asyncio.get_running_loop().call_later(3, router.go_on.set)  # longer than one that says nothing is waited for
        done = await asked
    assert done.json()["choices"][0]["text"] == "fine"
    assert len(router.asked) == 1
    assert await blind(http) == before


async def test_a_client_that_hangs_up_gives_up_its_place(
    router: QueueingRouter, frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.go_on.clear()
        asked = asyncio.create_task(http.post("/v1/completions", json=asks(worker.model)))
        await until(lambda: router.waiting)
        asked.cancel()
        await until(lambda: router.left)
    assert router.left == 1


async def test_what_the_client_says_of_its_turn_and_its_place_reaches_the_router(
    router: QueueingRouter, frontend: Frontend, http: httpx.AsyncClient
) -> None:
    said = {
        "x-tokenmill-priority": "-7",
        "x-tokenmill-tenant": "team-a",
        "x-tokenmill-session": "chat-1",
        "x-tokenmill-session-hard": "true",
        "x-tokenmill-worker": "d-9",
        "x-tokenmill-labels": "zone=eu,gpu=h200",
    }
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.targets = [worker]
        done = await http.post("/v1/completions", json=asks(worker.model, max_tokens=5), headers=said)
        assert done.status_code == 200, done.text
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model=worker.model, prompt="the one and the other")
            request.sampling.max_tokens = 5
            async for _ in stub.Generate(request, timeout=60, metadata=tuple(said.items())):
                pass
    assert len(router.asked) == 2
    session = Routing(tenant="team-a", session="chat-1").session_id
    for asked in router.asked:
        assert (asked.priority, asked.tenant, asked.pinned_instance) == (-7, "team-a", "d-9")
        assert (asked.session_id, asked.session_hard) == (session, True)
        assert dict(asked.labels) == {"zone": "eu", "gpu": "h200"}
        assert asked.capabilities == ["priority"]
        assert 0 < asked.timeout_ms <= 600_000


async def test_a_header_that_makes_no_sense_is_refused(frontend: Frontend, http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/completions", json=asks("any"), headers={"x-tokenmill-priority": "urgent"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-tokenmill-priority"


async def test_routers_are_asked_in_turn(router: QueueingRouter, frontend: Frontend, http: httpx.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(routing(frontend, QueueingRouter()))
        worker = await stack.enter_async_context(serving(frontend, ScriptedDecode(answer)))
        router.targets = other.targets = [worker]

        async def both_asked() -> bool:
            done = await http.post("/v1/completions", json=asks(worker.model))
            assert done.status_code == 200, done.text
            return bool(router.asked and other.asked)

        async with asyncio.timeout(60):
            while not await both_asked():
                pass
        before = len(router.asked), len(other.asked)
        for _ in range(6):
            await both_asked()
    assert len(router.asked) - before[0] >= 2
    assert len(other.asked) - before[1] >= 2
