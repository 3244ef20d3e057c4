"""Workers and routers that leave an answer alone in less obvious ways, and what is remembered of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.errors import EngineFailed, Overloaded, Stalled, Unavailable
from tests.integration.frontend.peers import (
    Context,
    Frontend,
    Live,
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedRouter,
    card_of,
    ids,
    prefilling,
    published,
    routing,
    running_frontend,
    serving,
    until,
)
from tests.integration.frontend.suites import counted
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2
from tokenmill.prefill.v1 import prefill_pb2_grpc
from tokenmill.router.v1 import router_pb2


@pytest.fixture(scope="module")
def frontend(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """One of its own: the routers here are for all its models."""
    flags = ("--schedule-timeout-s", "4", "--replacement-wait-s", "20")
    with running_frontend(etcd, nats, tmp_path_factory.mktemp("frontend") / "log", *flags) as running:
        yield running


@pytest.fixture
async def http(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
        yield client


@pytest.fixture
async def router(frontend: Frontend) -> AsyncIterator[ScriptedRouter]:
    async with routing(frontend) as router:
        yield router


async def answer(live: Live) -> None:
    live.send("fine")
    live.finish(tokens=len(ids("fine")))


async def break_stream(live: Live) -> None:
    live.stream.outgoing.put_nowait(decode_pb2.StepBatch(slots=[1], counts=[]))  # cannot be read: the columns differ


def asks(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the one and the other"} | fields


def pulses(live: Live, count: int, **pulse: int) -> None:
    for _ in range(count):
        live.stream.outgoing.put_nowait(decode_pb2.StepBatch(pulse=decode_pb2.Pulse(**pulse)))


async def test_an_answer_that_a_living_worker_forgot_goes_on_elsewhere(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def forget(live: Live) -> None:
        live.send("so ")
        pulses(live, 5)

    async def go_on(live: Live) -> None:
        live.send("far")
        live.finish(tokens=len(ids("far")))

    forgetful, healthy = ScriptedDecode(forget), ScriptedDecode(go_on)
    healthy.model = forgetful.model
    async with serving(frontend, forgetful), serving(frontend, healthy):
        router.targets = [forgetful, healthy]
        done = await http.post("/v1/completions", json=asks(forgetful.model))
        await until(lambda: forgetful.cancelled)
    assert done.json()["choices"][0]["text"] == "so far"


async def test_an_answer_that_a_full_worker_has_put_back_stays_there(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def put_back(live: Live) -> None:
        live.send("so ")
        pulses(live, 100, waiting_requests=1)
        live.send("far")
        live.finish(tokens=len(ids("so far")))

    async with serving(frontend, ScriptedDecode(put_back)) as worker:
        router.targets = [worker]
        done = await http.post("/v1/completions", json=asks(worker.model))
    assert done.json()["choices"][0]["text"] == "so far"
    assert len(router.asked) == 1


async def test_a_request_says_which_life_of_its_worker_it_is_for_and_whose_it_is(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.targets = [worker]
        for router.epoch in (2**63, 7):
            await http.post("/v1/completions", json=asks(worker.model))
    newer, older = (one.request.epoch for one in worker.requests)
    assert newer == 2**63, "what the router saw may be newer than what the frontend has"
    assert 7 < older < 2**63, "an old one is not used: the worker is chosen blind, as it is published"
    assert all(one.frontend_id.startswith("frontend-") for one in router.asked)


async def test_an_answer_waits_for_the_successor_of_its_only_worker(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async def send_half(live: Live) -> None:
        live.send("so ")

    async def send_rest(live: Live) -> None:
        live.send("far")
        live.finish(tokens=len(ids("far")))

    dying, successor = ScriptedDecode(send_half), ScriptedDecode(send_rest)
    successor.model = dying.model
    text = ""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(frontend, dying))
        asked = asks(dying.model, stream=True)
        response = await stack.enter_async_context(http.stream("POST", "/v1/completions", json=asked))
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(one["text"] for one in json.loads(line.removeprefix("data: "))["choices"])
            if text == "so " and not successor.address:
                assert dying.server is not None
                await dying.server.stop(None)
                # The same instance, in another life.
                await stack.enter_async_context(serving(frontend, successor, instance_id=dying.instance_id))
    assert text == "so far"
    assert list(successor.requests[0].request.prompt_token_ids)[-len(ids("so ")) :] == ids("so ")


async def test_a_request_waits_for_a_worker_for_a_while_and_later_ones_do_not(
    etcd: str, nats: str, tmp_path: Any
) -> None:
    with running_frontend(etcd, nats, tmp_path / "log", "--replacement-wait-s", "2") as frontend:
        async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as http:
            async with serving(frontend, ScriptedDecode(answer)) as worker:
                assert (await http.post("/v1/completions", json=asks(worker.model))).status_code == 200
            waited = await http.post("/v1/completions", json=asks(worker.model))
            began = asyncio.get_running_loop().time()
            refused = [await http.post("/v1/completions", json=asks(worker.model)) for _ in range(50)]
            assert asyncio.get_running_loop().time() - began < 50, "none of them waits"
            late = ScriptedDecode(answer)
            late.model = worker.model
            async with serving(frontend, late):
                assert (await http.post("/v1/completions", json=asks(worker.model))).status_code == 200
    for one in (waited, *refused):
        assert (one.status_code, one.headers["retry-after"]) == (503, "1")


async def test_a_worker_that_was_stalled_is_used_again_once_its_stream_is_new(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async def stall_once(live: Live) -> None:
        if len(worker.requests) == 1:
            live.send("so ")
            live.finish(
                common_pb2.FINISH_REASON_ERROR, error=Stalled("hangs")
            )  # never twice on the stream it stalled on
            await break_stream(live)
        else:
            live.send("far")
            live.finish(tokens=len(ids("far")))

    worker = ScriptedDecode(stall_once)
    async with serving(frontend, worker):
        done = await http.post("/v1/completions", json=asks(worker.model))
    assert done.json()["choices"][0]["text"] == "so far"


async def test_an_answer_half_done_is_offered_again_where_there_was_no_room_for_it(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def send_half(live: Live) -> None:
        live.send("so ")
        dying.attach_refusal = Unavailable("does not come back")  # or it would be as good as any
        full.refusal = Overloaded("full", retry_after_s=0.1)
        await break_stream(live)

    async def send_rest(live: Live) -> None:
        live.send("far")
        live.finish(tokens=len(ids("far")))

    dying, full = ScriptedDecode(send_half), ScriptedDecode(send_rest)
    full.model = dying.model
    async with serving(frontend, dying), serving(frontend, full):
        router.targets = [dying, full]
        asking = asyncio.create_task(http.post("/v1/completions", json=asks(dying.model)))
        await until(lambda: len(router.asked) >= 5)
        full.refusal = None
        done = await asking
    assert done.json()["choices"][0]["text"] == "so far"
    assert len({one.request_id for one in router.asked}) == len(router.asked)


async def test_a_worker_that_keeps_failing_is_avoided_and_tried_again(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    broken, healthy = ScriptedDecode(answer), ScriptedDecode(answer)
    healthy.model = broken.model
    broken.refusal = EngineFailed("boom")
    async with serving(frontend, broken), serving(frontend, healthy):
        router.targets = [broken, healthy]

        async def is_avoided() -> bool:
            done = await http.post("/v1/completions", json=asks(broken.model))
            assert done.json()["choices"][0]["text"] == "fine"
            return broken.instance_id in router.asked[-1].avoided_instances

        async with asyncio.timeout(30):
            for _ in range(3):
                await http.post("/v1/completions", json=asks(broken.model))
            # A router that has nobody else may use it all the same.
            while not await is_avoided():
                pass
            assert await counted(http, 'tokenmill_breakers{state="open"}') == 1
            broken.refusal = None
            while await is_avoided():  # noqa: ASYNC110  each look is a request, which may be the one that tries it
                await asyncio.sleep(0.05)
        assert await counted(http, 'tokenmill_breakers{state="open"}') == 0


@pytest.mark.parametrize("death", ["killed", "stopped"])
async def test_with_two_routers_the_loss_of_one_is_not_seen(
    frontend: Frontend, http: httpx.AsyncClient, death: str
) -> None:
    before = await counted(http, "tokenmill_schedule_blind_total")
    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        routing(frontend) as one,
        routing(frontend) as other,
    ):
        one.targets = other.targets = [worker]
        async with asyncio.timeout(30):
            while not (one.asked and other.asked):
                assert (await http.post("/v1/completions", json=asks(worker.model))).status_code == 200
        if death == "killed":
            assert one.server is not None
            await one.server.stop(None)
        else:
            one.delay_s = 300.0
        asked = len(other.asked)
        for _ in range(10):
            done = await http.post("/v1/completions", json=asks(worker.model))
            assert done.json()["choices"][0]["text"] == "fine"
        assert len(other.asked) == asked + 10
    assert await counted(http, "tokenmill_schedule_blind_total") == before


class _Health(health_pb2_grpc.HealthServicer):
    """Answers until it is silenced."""

    silent = False

    async def Check(self, request: Any, context: Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        if self.silent:
            await asyncio.sleep(300)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("silent", [True, False])
async def test_a_prompt_is_waited_for_only_while_its_worker_gives_a_sign_of_life(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient, silent: bool
) -> None:
    health, prefill = _Health(), ScriptedPrefill()

    def add(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)

    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        published(frontend, "prefill", add, card_of(worker.model)) as (instance, _, _),
    ):
        prefill.address, health.silent, prefill.delay_s = instance.address, silent, 40.0 if silent else 6.0
        router.targets = [worker]
        router.prefill = router_pb2.Target(instance_id=instance.instance_id, epoch=7, address=instance.address)
        done = await http.post("/v1/completions", json=asks(worker.model))
        assert done.json()["choices"][0]["text"] == "fine"
        assert worker.requests[0].request.HasField("kv") is not silent
        if silent:
            assert prefill.cancelled == 1
            await until(lambda: prefill.given_up == [prefill.ran[0].request_id])


async def test_kv_is_given_back_again_and_again_until_its_worker_hears_it(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    worker = ScriptedDecode(answer)
    worker.refusal = EngineFailed("boom")
    async with serving(frontend, worker), prefilling(frontend, router, worker.model) as prefill:
        router.targets = [worker]
        prefill.deaf_to_releases = 2
        assert (await http.post("/v1/completions", json=asks(worker.model))).status_code == 500
        await until(lambda: prefill.released == [f"kv-{prefill.ran[0].request_id}"], 30)
