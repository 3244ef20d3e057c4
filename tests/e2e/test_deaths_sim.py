"""Two prefill and two decode workers under load while parts are killed: no request fails, and the index comes right.

The router's index is compared with the workers' own picture block by block, through the same RPCs a person would use.
How long each recovery took is printed (`pytest -s`), not asserted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from kvcache.events import Tier
from tests.e2e.command_line import Tokenmill
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

_STREAMS = 8
_DEADLINE_S = 50
"""Ten times what is expected."""

Picture = dict[str, tuple[int, frozenset[int]]]
"""Instance -> its epoch and the blocks on its device."""


@dataclass
class Suite:
    """A running deployment with two workers a role."""

    url: str
    tokenmill: Tokenmill

    def instances(self) -> list[dict[str, Any]]:
        shown = self.tokenmill.run("status", "--json")
        return list(json.loads(shown.stdout)["instances"]) if shown.returncode == 0 else []


@dataclass
class Load:
    """What became of the requests sent so far."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)


@pytest.fixture
def suite(tokenmill: Tokenmill) -> Iterator[Suite]:
    started = tokenmill.run(
        "up", "-d", "--engine", "sim", "--time-scale", "20", "--port", "0", "--prefill", "2", "--decode", "2"
    )
    assert started.returncode == 0, started.stderr
    yield Suite(started.stdout.strip(), tokenmill)
    stopped = tokenmill.run("down")
    assert stopped.returncode == 0, stopped.stderr
    tokenmill.assert_nothing_left()


@asynccontextmanager
async def _under_load(url: str) -> AsyncIterator[Load]:
    """Keeps `_STREAMS` requests going, over prompts that share prefixes."""
    load = Load()
    numbers = iter(range(1_000_000))
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client, asyncio.TaskGroup() as tasks:

        async def ask_on() -> None:
            while True:
                number = next(numbers)
                prompt = f"Chapter {number % 5}. " * 60 + f"Question {number}"
                try:
                    await _ask(client, prompt)
                    load.answered += 1
                except (httpx.HTTPError, AssertionError) as error:
                    load.failed.append(repr(error)[:200])
                    await asyncio.sleep(0.02)

        asking = [tasks.create_task(ask_on()) for _ in range(_STREAMS)]
        yield load
        for task in asking:
            task.cancel()


async def _ask(client: httpx.AsyncClient, prompt: str) -> None:
    body = {"model": "sim", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 16


async def _served_again(load: Load) -> float:
    """Seconds until all streams have had an answer that began after now."""
    started, target = time.monotonic(), load.answered + 2 * _STREAMS
    await _until(lambda: load.answered >= target)
    return time.monotonic() - started


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110  processes have no event to wait for
            await asyncio.sleep(0.02)


async def _workers_picture(instances: list[dict[str, Any]]) -> Picture:
    picture: Picture = {}
    for one in instances:
        if not one["role"]:
            continue
        async with grpc.aio.insecure_channel(one["address"]) as channel:
            blocks: set[int] = set()
            epoch = 0
            async for part in kv_pb2_grpc.KvSourceStub(channel).GetKvSnapshot(kv_pb2.GetKvSnapshotRequest(), timeout=5):
                epoch = part.epoch
                if part.tier == Tier.DEVICE:
                    blocks.update(part.hashes)
            picture[one["instance_id"]] = (epoch, frozenset(blocks))
    return picture


async def _routers_picture(instances: list[dict[str, Any]]) -> Picture:
    picture: Picture = {}
    (router,) = (one for one in instances if one["service"] == "router")
    async with grpc.aio.insecure_channel(router["address"]) as channel:
        async for one in router_pb2_grpc.RouterStub(channel).GetIndex(router_pb2.GetIndexRequest(), timeout=5):
            picture[one.instance_id] = (one.epoch, frozenset(one.hashes))
    return picture


async def _index_equals_the_workers(suite: Suite) -> None:
    """Of an idle suite. Compares until they agree or the deadline is over, then once more for the message."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        instances = await asyncio.to_thread(suite.instances)
        workers = [one for one in instances if one["role"]]
        try:
            truth, believed = await _workers_picture(instances), await _routers_picture(instances)
        except (grpc.aio.AioRpcError, ValueError):  # a part is not back yet
            truth, believed = {}, {"nobody": (0, frozenset())}
        settled = len(workers) == 4 and all(one["state"] == "ready" for one in workers) and truth == believed
        if settled:
            assert any(blocks for _, blocks in truth.values())
            return
        if time.monotonic() > deadline:
            assert believed == truth
            raise AssertionError(f"workers are not back: {workers}")
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "victim", ["services.prefill", "services.decode", "services.router", "/nats-server ", "/etcd "]
)
async def test_no_request_fails_and_the_index_comes_right_after_a_kill(suite: Suite, victim: str) -> None:
    async with _under_load(suite.url) as load:
        await _until(lambda: load.answered >= 5 * _STREAMS)
        assert load.failed == []
        first = min(pid for pid, command in suite.tokenmill.processes().items() if victim in command)
        os.kill(first, signal.SIGKILL)
        print(f"\n{victim.strip()}: served again after {await _served_again(load):.2f} s", end="")
        assert load.failed == []
        await _until(
            lambda: any(pid != first and victim in command for pid, command in suite.tokenmill.processes().items())
        )
        await _served_again(load)
        assert load.failed == []
    killed = time.monotonic()
    await _index_equals_the_workers(suite)
    print(f", index right {time.monotonic() - killed:.2f} s after the load ended")
