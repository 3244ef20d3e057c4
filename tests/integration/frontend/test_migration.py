"""Real workers killed, or stopped, in the middle of many answers: every client gets what it would have got without.

The simulated model says tokens that are halves of characters with a word between them, each a function of all tokens
before it. So whenever a worker dies half a character is held back, and a token lost, repeated or changed makes all text
after it another one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from engines.sim.tokenizer import builtin_tokenizer_json
from tests.integration.frontend.peers import Frontend, running_frontend, until, until_workers
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

_ANSWERS = 36
_TOKENS = 250
"""Two seconds and more at the simulated engine's 8 ms a step."""
_MODEL = "halves"

Outcome = tuple[str, str, int, int]
"""Text, finish reason, tokens of prompt and answer."""


@dataclass
class Suite:
    """A frontend, a router and maybe a prefill worker; `running` adds to them."""

    frontend: Frontend
    flags: list[str]
    logs: Path
    remote: bool
    """Prompts are computed by the prefill worker."""

    @contextmanager
    def running(self, service: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.logs / f"{service}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", f"services.{service}", *self.flags, *flags], stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _write_tokenizer(directory: Path) -> None:
    """256 bytes, and more than twice as many tokens that end one character and begin the next."""
    tokenizer = json.loads(builtin_tokenizer_json())
    vocab = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < 256}
    byte = list(vocab)  # in the order of the bytes they stand for
    first, last = ("".join(byte[one] for one in part) for part in ("👋".encode()[:2], "👋".encode()[2:]))
    for n in range(700):
        vocab[f"{last}{n}{first}"] = len(vocab)
    tokenizer["model"] |= {"vocab": vocab, "merges": []}
    tokenizer["added_tokens"] = []
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture(params=["decode alone", "remote prefill"])
def suite(request: pytest.FixtureRequest, etcd: str, nats: str, tmp_path: Path) -> Iterator[Suite]:
    _write_tokenizer(tmp_path)
    with running_frontend(etcd, nats, tmp_path / "frontend.log") as frontend, ExitStack() as stack:
        flags = ["--etcd", etcd, "--nats", nats, "--deployment", frontend.deployment]
        suite = Suite(frontend, flags, tmp_path, request.param == "remote prefill")
        stack.enter_context(suite.running("router"))
        suite.flags += ["--engine", "sim", "--model", str(tmp_path), "--served-model-name", _MODEL]
        if suite.remote:
            stack.enter_context(suite.running("prefill"))
        yield suite


@pytest.fixture
async def http(suite: Suite) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.frontend.url, timeout=60, limits=limits) as client:
        yield client


def _body(number: int, stop: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": _MODEL, "prompt": f"{number} river " * 9, "max_tokens": _TOKENS, "temperature": 0}
    return body | ({"stop": [stop]} if stop else {})


async def _whole(http: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


class Load:
    """Answers in the making; `begun` counts the streams that have some text."""

    def __init__(self, http: httpx.AsyncClient, stub: Any) -> None:
        self._http = http
        self._stub = stub
        self.begun = 0

    async def over_http(self, body: dict[str, Any]) -> Outcome:
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage = "", "", {}
        async with self._http.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    self.begun += bool(choice["text"] and not text)
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
        return text, reason, usage["prompt_tokens"], usage["completion_tokens"]

    async def over_grpc(self, body: dict[str, Any]) -> Outcome:
        request = inference_pb2.GenerateRequest(
            model=_MODEL,
            prompt=body["prompt"],
            sampling=common_pb2.Sampling(max_tokens=_TOKENS, temperature=0),
            stop=body.get("stop"),
        )
        text, tokens, last = "", 0, inference_pb2.GenerateResponse()
        async for last in self._stub.Generate(request, timeout=60):
            self.begun += bool(last.text and not text)
            text += last.text
            tokens += len(last.token_ids)
        assert tokens == last.usage.completion_tokens
        reason = "stop" if last.finish_reason == common_pb2.FINISH_REASON_STOP else "length"
        return text, reason, last.usage.prompt_tokens, last.usage.completion_tokens

    async def all_at_once(self, body: dict[str, Any]) -> Outcome:
        return await _whole(self._http, body)


async def _counted(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def _until_answered(suite: Suite, http: httpx.AsyncClient) -> None:
    """Waits until answers come the way that this suite is there for."""
    async with asyncio.timeout(60):
        for attempt in itertools.count():
            # Another prompt each time: one that decode has seen needs no prefill.
            response = await http.post("/v1/completions", json=_body(1000 + attempt, "") | {"max_tokens": 1})
            usage = response.json().get("usage", {})
            if response.status_code == 200 and bool(usage.get("tokenmill", {}).get("remote_tokens")) == suite.remote:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
async def test_answers_whose_worker_is_lost_are_those_of_workers_that_live(
    suite: Suite, http: httpx.AsyncClient, death: signal.Signals
) -> None:
    with suite.running("decode") as victim, ExitStack() as stack:
        await _until_answered(suite, http)
        plain = await asyncio.gather(*(_whole(http, _body(n, "")) for n in range(_ANSWERS)))
        # Every second answer stops at what it says late, from the middle of one token into the next.
        stops = ["" if n % 2 else text[len(text) * 4 // 5 :][:8] for n, (text, *_) in enumerate(plain)]
        bodies = [_body(n, stop) for n, stop in enumerate(stops)]
        expected = await asyncio.gather(*(_whole(http, body) for body in bodies))
        assert {reason for _, reason, *_ in expected} == {"stop", "length"}
        assert all("👋" in text for text, *_ in expected)
        stack.enter_context(suite.running("decode"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{suite.frontend.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await until_workers(f"127.0.0.1:{suite.frontend.grpc_port}", _MODEL, 2)
            load = Load(http, stub)
            ways = (load.over_http, load.over_grpc, load.all_at_once)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ways[n // 2 % 3](body)) for n, body in enumerate(bodies)]
                await until(lambda: load.begun == _ANSWERS * 2 // 3)
                victim.send_signal(death)
        assert [one.result() for one in asked] == expected
        assert await _counted(http, "tokenmill_migrations_total") >= _ANSWERS // 4
