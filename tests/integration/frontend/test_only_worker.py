"""The only worker of its kind lost under load: its answers wait for it, or its successor, and are what they were."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.integration.frontend.peers import running_frontend, until
from tests.integration.frontend.suites import MODEL, Load, Suite, body_of, counted, whole, write_tokenizer

_ANSWERS = 12
_DEADLINE_S = 120
_ID = ("--instance-id", "decode-1")


@pytest.fixture
def suite(etcd: str, nats: str, tmp_path: Path) -> Iterator[Suite]:
    """A frontend and a router; the test adds workers."""
    write_tokenizer(tmp_path)
    flags = ("--replacement-wait-s", str(_DEADLINE_S))
    with running_frontend(etcd, nats, tmp_path / "frontend.log", *flags) as frontend, ExitStack() as stack:
        shared = ["--etcd", etcd, "--nats", nats, "--deployment", frontend.deployment]
        suite = Suite(frontend, shared, tmp_path, remote=False)
        stack.enter_context(suite.running("router"))
        suite.flags += ["--engine", "sim", "--model", str(tmp_path), "--served-model-name", MODEL]
        yield suite


@pytest.fixture
async def http(suite: Suite) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=suite.frontend.url, timeout=2 * _DEADLINE_S) as client:
        yield client


async def _until_served(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while (await http.get(f"/v1/models/{MODEL}")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("death", ["killed", "stopped", "hung"])
async def test_answers_wait_for_their_only_worker_to_be_back(suite: Suite, http: httpx.AsyncClient, death: str) -> None:
    with suite.running("decode", *_ID, "--fault", "hang") as victim, ExitStack() as stack:
        await _until_served(http)
        bodies = [body_of(n, "") for n in range(_ANSWERS)]
        expected = await asyncio.gather(*(whole(http, body) for body in bodies))
        load = Load(http, None)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(load.over_http(body)) for body in bodies]
            await until(lambda: load.begun == _ANSWERS, _DEADLINE_S)
            lost = await counted(http, "tokenmill_migrations_total")
            if death == "killed":
                victim.kill()
                stack.enter_context(suite.running("decode", *_ID))
            else:
                victim.send_signal(signal.SIGSTOP if death == "stopped" else signal.SIGUSR1)
                async with asyncio.timeout(_DEADLINE_S):
                    while await counted(http, "tokenmill_migrations_total") == lost:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                victim.send_signal(signal.SIGCONT if death == "stopped" else signal.SIGUSR2)
        assert [one.result() for one in asked] == expected
        print(f"\n{death}: longest gap {load.longest_gap_s:.2f} s", end="")


async def test_a_prompt_does_not_wait_for_a_stopped_prefill_worker(suite: Suite, http: httpx.AsyncClient) -> None:
    with suite.running("decode"), suite.running("prefill") as prefill:
        await _until_served(http)
        async with asyncio.timeout(_DEADLINE_S):
            for attempt in itertools.count():
                done = await http.post("/v1/completions", json=body_of(1000 + attempt, "") | {"max_tokens": 1})
                if done.json()["usage"].get("tokenmill", {}).get("remote_tokens"):
                    break
        prefill.send_signal(signal.SIGSTOP)
        body = body_of(1, "") | {"max_tokens": 3}
        done = await http.post("/v1/completions", json=body)
        assert done.json()["usage"]["completion_tokens"] == 3
        assert await counted(http, "tokenmill_prefill_fallbacks_total") == 1
        prefill.send_signal(signal.SIGCONT)
