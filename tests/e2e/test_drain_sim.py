"""Instances drained, undrained and followed by others under load: no request fails, no answer is cut, none differs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.command_line import Tokenmill
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

_DEADLINE_S = 60
"""Ten times what is expected."""
_TOKENS, _LONG_TOKENS = 48, 20_000
_PROMPTS = [f"Chapter {number}. " * 40 for number in range(6)]


@dataclass
class Suite:
    """A running deployment."""

    url: str
    tokenmill: Tokenmill

    def instances(self) -> dict[str, dict[str, Any]]:
        shown = self.tokenmill.run("status", "--json")
        assert shown.returncode == 0, shown.stderr
        return {one["instance_id"]: one for one in json.loads(shown.stdout)["instances"]}

    def of(self, role: str) -> list[str]:
        return [name for name, one in self.instances().items() if (one["role"] or one["service"]) == role]

    def states(self) -> set[str]:
        return {one["state"] for one in self.instances().values()}


@pytest.fixture
def suite(tokenmill: Tokenmill) -> Iterator[Suite]:
    started = tokenmill.run("up", "-d", "--engine", "sim", "--time-scale", "10", "--port", "0", "--prefill", "2",
                            "--decode", "2", "--drain-timeout-s", "1")  # fmt: skip
    assert started.returncode == 0, started.stderr
    yield Suite(started.stdout.strip(), tokenmill)
    stopped = tokenmill.run("down")
    assert stopped.returncode == 0, stopped.stderr
    tokenmill.assert_nothing_left()


@dataclass
class Load:
    """What became of the requests so far."""

    answered: dict[str, int] = field(default_factory=dict)
    """By how they were asked for."""
    failed: list[str] = field(default_factory=list)

    async def goes_on(self) -> None:
        """Waits until everybody has had an answer that began after now."""
        target = {way: count + 3 for way, count in self.answered.items()}
        async with asyncio.timeout(_DEADLINE_S):
            while any(self.answered[way] < count for way, count in target.items()):
                assert self.failed == []
                await asyncio.sleep(0.02)


@asynccontextmanager
async def under_load(suite: Suite) -> AsyncIterator[Load]:
    """Requests over kept connections, over new ones, as streams, over gRPC. Every answer must be the first one's."""
    load = Load()
    (frontend,) = suite.of("frontend")
    grpc_address = suite.instances()[frontend]["address"]
    expected: dict[str, str] = {}

    async def whole(client: httpx.AsyncClient, prompt: str) -> str:
        response = await client.post("/v1/completions", json=_body(prompt))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == _TOKENS
        return str(response.json()["choices"][0]["text"])

    async def streamed(client: httpx.AsyncClient, prompt: str) -> str:
        text, last = "", ""
        async with client.stream("POST", "/v1/completions", json=_body(prompt) | {"stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
        assert last == "data: [DONE]"
        return text

    async def anew(_: httpx.AsyncClient, prompt: str) -> str:
        async with httpx.AsyncClient(base_url=suite.url, timeout=30, trust_env=False) as client:
            return await whole(client, prompt)

    async with (
        httpx.AsyncClient(base_url=suite.url, timeout=30, trust_env=False) as kept,
        grpc.aio.insecure_channel(grpc_address) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def over_grpc(_: httpx.AsyncClient, prompt: str) -> str:
            sampling = common_pb2.Sampling(max_tokens=_TOKENS, ignore_eos=True, temperature=0.0)
            request = inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
            return "".join([response.text async for response in stub.Generate(request, timeout=30)])

        for prompt in _PROMPTS:
            expected[prompt] = await whole(kept, prompt)

        async def ask_on(way: Any, first: int) -> None:
            for number in range(first, 1_000_000):
                prompt = _PROMPTS[number % len(_PROMPTS)]
                try:
                    assert await way(kept, prompt) == expected[prompt]
                    load.answered[way.__name__] += 1
                except (httpx.HTTPError, grpc.aio.AioRpcError, AssertionError) as error:
                    load.failed.append(f"{way.__name__}: {error!r}"[:300])
                    await asyncio.sleep(0.05)

        ways = (whole, streamed, anew, over_grpc)
        load.answered = dict.fromkeys((way.__name__ for way in ways), 0)
        asking = [tasks.create_task(ask_on(way, number)) for number, way in enumerate(ways)]
        yield load
        for task in asking:
            task.cancel()
    assert load.failed == []


@asynccontextmanager
async def _long_answer(suite: Suite) -> AsyncIterator[asyncio.Task[int]]:
    """One that takes longer than a drain may; it has begun, and the task counts its tokens."""
    body = _body("A long story.") | {"max_tokens": _LONG_TOKENS, "stream": True}
    async with (
        httpx.AsyncClient(base_url=suite.url, timeout=_DEADLINE_S, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as answer,
    ):
        lines = answer.aiter_lines()
        assert "text" in await anext(lines)

        async def count() -> int:
            async for line in lines:
                if '"usage"' in line and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                    return int(usage["completion_tokens"])
            return 0

        yield asyncio.create_task(count())


def _body(prompt: str) -> dict[str, Any]:
    return {"model": "sim", "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0}


async def _run(suite: Suite, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = await asyncio.to_thread(suite.tokenmill.run, *arguments)
    assert done.returncode == 0, done.stderr
    return done


async def test_drained_workers_lose_no_answer_stay_away_and_come_back_when_asked(suite: Suite) -> None:
    victims = [suite.of(role)[0] for role in ("decode", "prefill")]
    async with under_load(suite) as load:
        await load.goes_on()
        for victim in victims:
            said = (await _run(suite, "drain", victim, "--timeout", "30")).stdout
            assert f"{victim} drains, for 30 s at most" in said or "drains, for 29." in said
            assert f"{victim} is gone after" in said
            await load.goes_on()
        assert not set(victims) & set(await asyncio.to_thread(suite.instances))
        for victim in victims:
            said = (await _run(suite, "restart", victim)).stdout
            assert f"{victim}, pid" in said, "under the same id"
        await load.goes_on()
        assert await asyncio.to_thread(suite.states) == {"ready"}
    unknown = suite.tokenmill.run("drain", victims[0][:-1])
    assert (unknown.returncode, victims[0] in unknown.stderr) == (1, True), "the nearest one is named"


async def test_a_drain_is_taken_back_while_an_answer_runs(suite: Suite) -> None:
    worker = suite.of("decode")[0]
    assert suite.tokenmill.run("drain", suite.of("decode")[1]).returncode == 0
    body = _body("A long story.") | {"max_tokens": 30_000}
    async with (
        httpx.AsyncClient(base_url=suite.url, timeout=_DEADLINE_S, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
    ):
        events = answer.aiter_lines()
        assert "text" in await anext(events)
        await _run(suite, "drain", worker, "--no-wait", "--timeout", "60")
        assert (await asyncio.to_thread(suite.instances))[worker]["state"] == "draining"
        await _run(suite, "undrain", worker)
        assert (await asyncio.to_thread(suite.instances))[worker]["state"] == "ready"
        other = await client.post("/v1/completions", json=_body("And another one."))
        assert other.status_code == 200, other.text
        async for event in events:
            assert "error" not in event
            if "text" in event:
                break


async def test_every_service_is_followed_by_another_without_a_lost_request(suite: Suite) -> None:
    before = suite.instances()
    async with under_load(suite) as load:
        await load.goes_on()
        await _run(suite, "restart", "--rolling")
        await load.goes_on()
        async with _long_answer(suite) as rest:
            await _run(suite, "restart", "frontend", "--rolling")
            assert await rest == _LONG_TOKENS, "it is not cut off where it cannot go on elsewhere"
        await _run(suite, "restart", "etcd", "nats")
        await load.goes_on()
    after = suite.instances()
    assert set(after) == {f"{name}-{3 if name.startswith('frontend') else 2}" for name in before}
    assert not {one["pid"] for one in after.values()} & {one["pid"] for one in before.values()}
    (old,), (new,) = ([one for one in of.values() if one["service"] == "frontend"] for of in (before, after))
    assert new["http_address"] == old["http_address"]
    assert new["address"] == old["address"], "gRPC clients find it where it was"


def test_who_comes_while_a_killed_frontend_is_away_waits_and_is_served(suite: Suite) -> None:
    frontend = suite.instances()[suite.of("frontend")[0]]
    os.kill(frontend["pid"], signal.SIGKILL)
    response = httpx.post(f"{suite.url}/v1/completions", json=_body("Hello"), timeout=_DEADLINE_S, trust_env=False)
    assert response.status_code == 200, response.text


def test_a_deployment_that_is_not_run_here_says_how_to_restart_it(tokenmill: Tokenmill) -> None:
    refused = tokenmill.run("restart", "--rolling", "--deployment", "in-containers")
    assert refused.returncode == 1
    assert "'in-containers' is not run by `tokenmill up`" in refused.stderr
    assert "tokenmill drain" in refused.stderr
