"""Real workers killed, or stopped, in the middle of many answers: every client gets what it would have got without.

The simulated model says tokens that are halves of characters with a word between them, each a function of all tokens
before it. So whenever a worker dies half a character is held back, and a token lost, repeated or changed makes all text
after it another one.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from tests.integration.frontend.peers import running_frontend, until, until_workers
from tests.integration.frontend.suites import MODEL, Load, Suite, body_of, counted, whole, write_tokenizer
from tokenmill.inference.v1 import inference_pb2_grpc

_ANSWERS = 36


@pytest.fixture(params=["decode alone", "remote prefill"])
def suite(request: pytest.FixtureRequest, etcd: str, nats: str, tmp_path: Path) -> Iterator[Suite]:
    write_tokenizer(tmp_path)
    with running_frontend(etcd, nats, tmp_path / "frontend.log") as frontend, ExitStack() as stack:
        flags = ["--etcd", etcd, "--nats", nats, "--deployment", frontend.deployment]
        suite = Suite(frontend, flags, tmp_path, request.param == "remote prefill")
        stack.enter_context(suite.running("router"))
        suite.flags += ["--engine", "sim", "--model", str(tmp_path), "--served-model-name", MODEL]
        if suite.remote:
            stack.enter_context(suite.running("prefill"))
        yield suite


@pytest.fixture
async def http(suite: Suite) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.frontend.url, timeout=60, limits=limits) as client:
        yield client


async def _until_answered(suite: Suite, http: httpx.AsyncClient) -> None:
    """Waits until answers come the way that this suite is there for."""
    async with asyncio.timeout(60):
        for attempt in itertools.count():
            # Another prompt each time: one that decode has seen needs no prefill.
            response = await http.post("/v1/completions", json=body_of(1000 + attempt, "") | {"max_tokens": 1})
            usage = response.json().get("usage", {})
            if response.status_code == 200 and bool(usage.get("tokenmill", {}).get("remote_tokens")) == suite.remote:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1], ids=["killed", "stopped", "hung"])
async def test_answers_whose_worker_is_lost_are_those_of_workers_that_live(
    suite: Suite, http: httpx.AsyncClient, death: signal.Signals
) -> None:
    with suite.running("decode", "--fault", "hang") as victim, ExitStack() as stack:
        await _until_answered(suite, http)
        plain = await asyncio.gather(*(whole(http, body_of(n, "")) for n in range(_ANSWERS)))
        # Every second answer stops at what it says late, from the middle of one token into the next.
        stops = ["" if n % 2 else text[len(text) * 4 // 5 :][:8] for n, (text, *_) in enumerate(plain)]
        bodies = [body_of(n, stop) for n, stop in enumerate(stops)]
        expected = await asyncio.gather(*(whole(http, body) for body in bodies))
        assert {reason for _, reason, *_ in expected} == {"stop", "length"}
        assert all("👋" in text for text, *_ in expected)
        stack.enter_context(suite.running("decode"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{suite.frontend.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await until_workers(f"127.0.0.1:{suite.frontend.grpc_port}", MODEL, 2)
            load = Load(http, stub)
            ways = (load.over_http, load.over_grpc, load.all_at_once)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ways[n // 2 % 3](body)) for n, body in enumerate(bodies)]
                await until(lambda: load.begun == _ANSWERS * 2 // 3, 60)
                victim.send_signal(death)
        assert [one.result() for one in asked] == expected
        assert await counted(http, "tokenmill_migrations_total") > 0
