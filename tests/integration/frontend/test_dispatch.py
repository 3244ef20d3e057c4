"""Place, prefill, decode, and what happens when one of them does not play along."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd
from controlplane.errors import Draining, EngineFailed, Overloaded, Unavailable
from kvcache.hashing import hash_blocks, root_hash
from tests.integration.frontend.peers import (
    Frontend,
    Live,
    ScriptedDecode,
    ScriptedRouter,
    ids,
    prefilling,
    routing,
    running_frontend,
    serving,
    until,
    until_workers,
)
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

PROMPT = "the one and the other " * 8


@pytest.fixture(scope="module")
def frontend(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """One of its own: the router here is for all its models."""
    flags = ("--prefill-timeout-s", "2", "--schedule-timeout-s", "2", "--replacement-wait-s", "1")
    with running_frontend(etcd, nats, tmp_path_factory.mktemp("frontend") / "log", *flags) as running:
        yield running


@pytest.fixture
async def router(frontend: Frontend) -> AsyncIterator[ScriptedRouter]:
    async with routing(frontend) as router:
        yield router


async def answer(live: Live) -> None:
    live.send("fine")
    live.finish(tokens=len(ids("fine")))


async def break_stream(live: Live) -> None:
    """As a worker that dies, once all that it sent has come."""
    live.stream.outgoing.put_nowait(decode_pb2.StepBatch(slots=[1], counts=[]))  # cannot be read: the columns differ


def asks(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT} | fields


async def counted(http: httpx.AsyncClient, name: str) -> float:
    """A counter's present value, over all its labels that match."""
    text = (await http.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


async def test_the_router_is_asked_with_hashes_and_told_what_came_of_it(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.targets = [worker]
        done = await http.post("/v1/completions", json=asks(worker.model, max_tokens=9))
        assert done.json()["choices"][0]["text"] == "fine"
        await until(lambda: len(router.told) >= 2)
    (asked,) = router.asked
    request = worker.requests[0].request
    assert asked.request_id == request.request_id
    assert (asked.model, asked.prompt_tokens, asked.max_tokens) == (worker.model, len(ids(PROMPT)), 9)
    discovery = await Discovery.connect(frontend.etcd, frontend.deployment, CollectorRegistry(), timeout_s=10)
    seed = await discovery.deployment_seed()
    await discovery.close()
    assert list(asked.block_hashes) == hash_blocks(ids(PROMPT), 16, root_hash("fingerprint", seed=seed), seed)
    told = {outcome.WhichOneof("outcome"): outcome for outcome in router.told}
    assert {outcome.request_id for outcome in router.told} == {request.request_id}
    assert told["first_token"].first_token.ttft_ms < 10_000
    assert (told["freed"].freed.cached_tokens, told["freed"].freed.completion_tokens) == (3, len(ids("fine")))


async def test_remote_prefill_hands_its_kv_to_decode_with_the_lease_that_is_left(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        prefilling(frontend, router, worker.model) as prefill,
    ):
        router.targets = [worker]
        done = await http.post("/v1/completions", json=asks(worker.model))
        await until(lambda: len(router.told) >= 3)
    assert done.json()["usage"]["tokenmill"] == {"remote_tokens": len(ids(PROMPT))}
    assert list(prefill.ran[0].prompt_token_ids) == ids(PROMPT)
    kv = worker.requests[0].request.kv
    assert kv.handle_id == f"kv-{prefill.ran[0].request_id}"
    assert 0 <= kv.lease_ms - kv.remaining_lease_ms < 10_000
    assert prefill.released == [], "decode reads it"
    prefilled = next(one.prefill_done for one in router.told if one.HasField("prefill_done"))
    assert (prefilled.cached_tokens, prefilled.elapsed_ms) == (5, 9)


@pytest.mark.parametrize(
    ("refusal", "delay_s", "reason"),
    [
        (EngineFailed("boom"), 0.0, "engine_failed"),
        (None, 30.0, "deadline_exceeded"),
        (Overloaded("full"), 0.0, "overloaded"),
    ],
)
async def test_when_prefill_fails_or_dawdles_decode_computes_the_prompt(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient, refusal: Any, delay_s: float, reason: str
) -> None:
    name = f'tokenmill_prefill_fallbacks_total{{reason="{reason}"}}'
    before = await counted(http, re.escape(name))
    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        prefilling(frontend, router, worker.model) as prefill,
    ):
        router.targets = [worker]
        prefill.refusal, prefill.delay_s = refusal, delay_s
        done = await http.post("/v1/completions", json=asks(worker.model))
    assert done.json()["choices"][0]["text"] == "fine"
    assert not worker.requests[0].request.HasField("kv")
    assert await counted(http, re.escape(name)) == before + 1


async def test_a_prefill_worker_that_hangs_leaves_decode_half_of_the_time(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        prefilling(frontend, router, worker.model) as prefill,
    ):
        router.targets = [worker]
        prefill.delay_s = 30.0
        done = await http.post("/v1/completions", json=asks(worker.model) | {"timeout_s": 3})
    assert done.json()["choices"][0]["text"] == "fine"


async def test_a_client_that_hangs_up_during_prefill_cancels_it(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with (
        serving(frontend, ScriptedDecode(answer)) as worker,
        prefilling(frontend, router, worker.model) as prefill,
    ):
        router.targets = [worker]
        prefill.delay_s = 30.0
        asking = asyncio.create_task(http.post("/v1/completions", json=asks(worker.model)))
        await until(lambda: prefill.ran)
        asking.cancel()
        await until(lambda: prefill.cancelled)
        await until(lambda: router.told)
        # A handle may have been on its way when the client left.
        await until(lambda: prefill.given_up == [prefill.ran[0].request_id])
    assert worker.requests == []
    assert router.told[0].HasField("freed"), "the router must not think it is still running"


async def test_when_decode_refuses_its_kv_is_given_back_and_another_worker_answers(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    full, free = ScriptedDecode(answer), ScriptedDecode(answer)
    full.refusal, free.model = Overloaded("full"), full.model
    async with (
        serving(frontend, full),
        serving(frontend, free),
        prefilling(frontend, router, full.model) as prefill,
    ):
        router.targets, router.delay_s = [full, free], 0.01
        done = await http.post("/v1/completions", json=asks(full.model))
        await until(lambda: prefill.released)
    assert done.json()["choices"][0]["text"] == "fine"
    first, second = router.asked
    assert (list(first.excluded_instances), list(second.excluded_instances)) == ([], [full.instance_id])
    assert (first.waited_ms, second.waited_ms > 0) == (0, True), "one bound for both waits"
    assert prefill.released == [f"kv-{first.request_id}"]
    assert free.requests[0].request.kv.handle_id == f"kv-{second.request_id}"
    assert first.request_id != second.request_id, "what is late of the first must not meet the second"


async def test_workers_that_drain_use_up_none_of_an_answers_attempts(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    draining, free = [ScriptedDecode(answer) for _ in range(3)], ScriptedDecode(answer)
    for one in draining:
        one.refusal, one.model = Draining("this worker is draining: try another"), free.model
    async with AsyncExitStack() as stack:
        for one in (*draining, free):
            await stack.enter_async_context(serving(frontend, one))
        router.targets = [*draining, free]
        done = await http.post("/v1/completions", json=asks(free.model))
    assert done.json()["choices"][0]["text"] == "fine", "three attempts is the most there are"


async def test_the_router_hears_of_a_first_token_while_the_answer_goes_on(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def go_on(live: Live) -> None:
        live.send("fine")
        await until(lambda: any(outcome.HasField("first_token") for outcome in router.told))
        live.finish(tokens=len(ids("fine")))

    async with serving(frontend, ScriptedDecode(go_on)) as worker:
        router.targets = [worker]
        done = await http.post("/v1/completions", json=asks(worker.model))
        await until(lambda: len(router.told) == 2)
    assert done.json()["choices"][0]["text"] == "fine"
    assert [outcome.WhichOneof("outcome") for outcome in router.told] == ["first_token", "freed"]


async def test_kv_that_a_lost_worker_may_not_have_read_is_given_back(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    dying, healthy = ScriptedDecode(break_stream), ScriptedDecode(answer)
    healthy.model = dying.model
    async with (
        serving(frontend, dying),
        serving(frontend, healthy),
        prefilling(frontend, router, dying.model) as prefill,
    ):
        router.targets = [dying, healthy]
        done = await http.post("/v1/completions", json=asks(dying.model))
        await until(lambda: prefill.released)
    assert done.json()["choices"][0]["text"] == "fine"
    assert prefill.released == [f"kv-{dying.requests[0].request.request_id}"]


async def test_a_refusal_of_the_only_worker_reaches_the_client(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.targets = [worker]
        worker.refusal = Overloaded("all 4 seats are taken", retry_after_s=2)
        done = await http.post("/v1/completions", json=asks(worker.model))
    assert (done.status_code, done.headers["retry-after"]) == (429, "2")
    assert done.json()["error"]["message"] == "all 4 seats are taken"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_lost_before_the_client_has_anything_is_replaced_unnoticed(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient, stream: bool
) -> None:
    async def die(live: Live) -> None:
        assert dying.server is not None
        if not stream:
            live.send("never seen")
        await dying.server.stop(None)

    dying, healthy = ScriptedDecode(die), ScriptedDecode(answer)
    healthy.model = dying.model
    async with serving(frontend, dying), serving(frontend, healthy):
        router.targets = [dying, healthy]
        # What came of a seeded answer cannot be gone on from.
        done = await http.post("/v1/completions", json=asks(dying.model, stream=stream, seed=1))
    assert done.status_code == 200
    assert "fine" in done.text
    assert "never seen" not in done.text
    assert len(dying.requests) == len(healthy.requests) == 1


SO_FAR, REST = ids("so far 👋")[:-2], ids("so far 👋")[-2:]


async def send_half(live: Live) -> None:
    """And die within a character."""
    live.send(SO_FAR)
    await break_stream(live)


async def send_rest(live: Live) -> None:
    live.send(REST)
    live.finish(tokens=len(REST))


async def test_an_answer_goes_on_where_its_worker_was_lost_with_the_tokens_so_far_as_prompt(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    before = await counted(http, "tokenmill_migrations_total")
    dying, healthy = ScriptedDecode(send_half), ScriptedDecode(send_rest)
    healthy.model = dying.model
    async with (
        serving(frontend, dying),
        serving(frontend, healthy),
        prefilling(frontend, router, dying.model) as prefill,
    ):
        router.targets = [dying, healthy]
        asked = asks(dying.model, max_tokens=40, min_tokens=len(SO_FAR) + 1, stop=["never"])
        done = await http.post("/v1/completions", json=asked)
        assert await counted(http, "tokenmill_migrations_total") == before + 1
    assert done.json()["choices"][0]["text"] == "so far 👋"
    usage = done.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids(PROMPT)), len(SO_FAR + REST))
    assert usage["tokenmill"] == {"remote_tokens": len(ids(PROMPT))}
    extended = [*ids(PROMPT), *SO_FAR]
    request = healthy.requests[0].request
    assert list(request.prompt_token_ids) == list(prefill.ran[1].prompt_token_ids) == extended
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (40 - len(SO_FAR), 1)
    assert request.request_id == f"{dying.requests[0].request.request_id}.2"
    first, second = router.asked
    assert (list(second.excluded_instances), second.prompt_tokens) == ([dying.instance_id], len(extended))
    full_blocks = len(ids(PROMPT)) // 16
    assert list(second.block_hashes[:full_blocks]) == list(first.block_hashes)
    assert len(second.block_hashes) == len(extended) // 16


async def test_a_seeded_stream_whose_worker_is_lost_ends_with_an_error_that_says_why(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    dying, healthy = ScriptedDecode(send_half), ScriptedDecode(send_rest)
    healthy.model = dying.model
    async with serving(frontend, dying), serving(frontend, healthy):
        router.targets = [dying, healthy]
        done = await http.post("/v1/completions", json=asks(dying.model, stream=True, seed=1))
    assert "so far" in done.text
    assert "an answer with seed cannot go on exactly on another worker" in done.text
    assert healthy.requests == []


async def test_an_answer_that_lacks_only_its_workers_last_word_is_complete(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    dying, healthy = ScriptedDecode(send_half), ScriptedDecode(send_rest)
    healthy.model = dying.model
    async with serving(frontend, dying), serving(frontend, healthy):
        router.targets = [dying, healthy]
        done = await http.post("/v1/completions", json=asks(dying.model, max_tokens=len(SO_FAR)))
    assert done.json()["choices"][0]["finish_reason"] == "length"
    assert done.json()["usage"]["completion_tokens"] == len(SO_FAR)
    assert healthy.requests == []


async def test_no_more_workers_are_tried_than_is_allowed(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    workers = [ScriptedDecode(send_half) for _ in range(4)]
    async with AsyncExitStack() as stack:
        for worker in workers:
            worker.model = workers[0].model
            await stack.enter_async_context(serving(frontend, worker))
        router.targets = workers
        done = await http.post("/v1/completions", json=asks(workers[0].model))
    assert done.status_code == 503
    assert [len(worker.requests) for worker in workers] == [1, 1, 1, 0]


async def test_with_migration_off_a_stream_whose_worker_is_lost_ends_with_an_error(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    with running_frontend(etcd, nats, tmp_path / "log", "--no-migration") as frontend:
        dying = ScriptedDecode(send_half)
        async with serving(frontend, dying), httpx.AsyncClient(base_url=frontend.url, timeout=60) as http:
            done = await http.post("/v1/completions", json=asks(dying.model, stream=True))
    assert "so far" in done.text
    assert '"code":"unavailable"' in done.text


async def test_a_worker_that_is_silent_for_three_seconds_is_lost(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def hang(live: Live) -> None:
        hanging.heartbeats = False

    hanging, healthy = ScriptedDecode(hang), ScriptedDecode(answer)
    healthy.model = hanging.model
    began = asyncio.get_running_loop().time()
    async with serving(frontend, hanging), serving(frontend, healthy):
        router.targets = [hanging, healthy]
        done = await http.post("/v1/completions", json=asks(hanging.model))
    assert done.json()["choices"][0]["text"] == "fine"
    assert 2.5 < asyncio.get_running_loop().time() - began < 60


async def test_a_worker_that_hangs_before_it_takes_a_request_is_lost_too(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    hanging, healthy = ScriptedDecode(answer), ScriptedDecode(answer)
    healthy.model = hanging.model
    async with serving(frontend, hanging), serving(frontend, healthy):
        router.targets = [hanging, healthy]
        hanging.heartbeats, hanging.submit_delay_s = False, 30.0
        done = await http.post("/v1/completions", json=asks(hanging.model))
    assert done.json()["choices"][0]["text"] == "fine"


async def test_without_a_router_in_time_a_worker_is_chosen_blind_and_counted(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    before = await counted(http, "tokenmill_schedule_blind_total")
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.delay_s = 30.0
        slow = await http.post("/v1/completions", json=asks(worker.model))
        router.delay_s, router.refusal = 0.0, Unavailable("still starting")
        refused = await http.post("/v1/completions", json=asks(worker.model))
    assert slow.json()["choices"][0]["text"] == refused.json()["choices"][0]["text"] == "fine"
    assert await counted(http, "tokenmill_schedule_blind_total") == before + 2


async def test_blind_choices_spread_over_the_workers(frontend: Frontend, http: httpx.AsyncClient) -> None:
    async def wait(live: Live) -> None:
        await go_on.wait()
        await answer(live)

    go_on = asyncio.Event()
    one, other = ScriptedDecode(wait), ScriptedDecode(wait)
    other.model = one.model
    async with serving(frontend, one), serving(frontend, other), asyncio.TaskGroup() as tasks:
        await until_workers(f"127.0.0.1:{frontend.grpc_port}", one.model, 2)
        for n in range(1, 5):
            tasks.create_task(http.post("/v1/completions", json=asks(one.model)))
            await until(lambda n=n: len(one.requests) + len(other.requests) == n)  # type: ignore[misc]
        go_on.set()
    assert (len(one.requests), len(other.requests)) == (2, 2)


async def test_a_router_that_is_full_is_believed(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        router.refusal = Overloaded("the queue is full", retry_after_s=3)
        done = await http.post("/v1/completions", json=asks(worker.model))
    assert (done.status_code, done.headers["retry-after"]) == (429, "3")
    assert worker.requests == []


async def test_a_message_that_makes_no_sense_ends_the_stream_and_not_the_frontend(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    odd, healthy = ScriptedDecode(break_stream), ScriptedDecode(answer)
    healthy.model = odd.model
    async with serving(frontend, odd), serving(frontend, healthy):
        router.targets = [odd, healthy]
        done = await http.post("/v1/completions", json=asks(odd.model))
        assert done.json()["choices"][0]["text"] == "fine"
        assert (await http.get("/health")).status_code == 200


async def test_readiness_ends_with_the_last_stream_and_returns_with_the_next(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async def status(wanted: int) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (ready := await http.get("/ready")).status_code != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        body: dict[str, Any] = ready.json()
        return body

    async with serving(frontend, ScriptedDecode(answer)) as worker:
        assert worker.model in (await status(200))["models"]
        assert worker.server is not None
        await worker.server.stop(None)  # its record is still there, as that of a killed worker
        assert (await status(503))["error"]["message"] == "no model can be served now"
        async with serving(frontend, ScriptedDecode(answer)) as other:
            assert other.model in (await status(200))["models"]


async def test_a_worker_that_refuses_its_stream_is_tried_again_until_it_does_not(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    worker = ScriptedDecode(answer)
    worker.attach_refusal = Unavailable("still loading")
    async with serving(frontend, worker):
        refused = await http.post("/v1/completions", json=asks(worker.model))
        assert refused.status_code == 503
        assert "still loading" in refused.json()["error"]["message"]
        worker.attach_refusal = None
        async with asyncio.timeout(60):
            while worker.model not in (await http.get("/ready")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await http.post("/v1/completions", json=asks(worker.model))).status_code == 200


async def test_losing_etcd_does_not_stop_serving(own_etcd: EmbeddedEtcd, nats: str, tmp_path: Path) -> None:
    with running_frontend(own_etcd.endpoint, nats, tmp_path / "log") as frontend:
        async with (
            serving(frontend, ScriptedDecode(answer)) as worker,
            httpx.AsyncClient(base_url=frontend.url, timeout=60) as http,
        ):
            own_etcd.kill()
            for _ in range(3):
                done = await http.post("/v1/completions", json=asks(worker.model), timeout=60)
                assert done.json()["choices"][0]["text"] == "fine"
            assert (await http.get("/ready")).status_code == 200


async def test_an_engine_that_fails_one_request_is_left_for_another(
    frontend: Frontend, router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    async def fail(live: Live) -> None:
        live.finish(common_pb2.FINISH_REASON_ERROR, error=EngineFailed("boom"))

    broken, healthy = ScriptedDecode(fail), ScriptedDecode(answer)
    healthy.model = broken.model
    async with serving(frontend, broken), serving(frontend, healthy):
        router.targets = [broken, healthy]
        done = await http.post("/v1/completions", json=asks(broken.model))
    assert done.json()["choices"][0]["text"] == "fine"
