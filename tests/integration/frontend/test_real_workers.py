"""The frontend with the real router and real workers, on the simulated engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.frontend.peers import Frontend, running_frontend

PROMPT = "The river, the garden and the letter 👋 — " * 10
MODEL = "sim"


@pytest.fixture(scope="module")
def suite(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Frontend, Path]]:
    """One of each service. Tests here do not stop any of them."""
    logs = tmp_path_factory.mktemp("suite")
    running: list[subprocess.Popen[bytes]] = []
    with running_frontend(etcd, nats, logs / "frontend") as frontend:
        flags = ["--etcd", etcd, "--nats", nats, "--deployment", frontend.deployment]
        try:
            for service, more in (("router", []), *((role, ["--engine", "sim"]) for role in ("prefill", "decode"))):
                with (logs / service).open("wb") as log:
                    command = [sys.executable, "-m", f"services.{service}", *flags, *more]
                    running.append(subprocess.Popen(command, stderr=log))
            until_remote(frontend)
            yield frontend, logs
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def until_remote(frontend: Frontend) -> None:
    """Waits until the router has found both workers: an answer came through remote prefill."""
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=frontend.url, timeout=30) as http:
        for attempt in range(10_000):
            # Another prompt each time: one that decode has seen needs no prefill.
            body = {"model": MODEL, "prompt": f"{attempt} {PROMPT}", "max_tokens": 1}
            answer = http.post("/v1/completions", json=body).json()
            if answer.get("usage", {}).get("tokenmill", {}).get("remote_tokens"):
                return
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)


@pytest.fixture
async def client(suite: tuple[Frontend, Path]) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{suite[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_an_answer_streamed_is_the_answer_whole(client: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL, "prompt": f"same {PROMPT}", "max_tokens": 40, "seed": 1, "temperature": 0}
    whole = await client.completions.create(**asked)  # type: ignore[call-overload]
    streamed = ""
    async for chunk in await client.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        streamed += chunk.choices[0].text
    assert streamed == whole.choices[0].text != ""
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 40)
    assert whole.usage.model_extra["tokenmill"]["remote_tokens"] > 0


async def test_many_at_once_each_get_their_own_whole_answer(client: openai.AsyncOpenAI) -> None:
    async def ask(n: int) -> tuple[str, int]:
        prompt = f"{n} {PROMPT}"
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=20 + n, seed=n, temperature=0)
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.completion_tokens

    first = await asyncio.gather(*(ask(n) for n in range(40)))
    assert [tokens for _, tokens in first] == [20 + n for n in range(40)]
    assert first == await asyncio.gather(*(ask(n) for n in range(40)))


async def test_nothing_a_client_wrote_or_read_is_in_any_log(
    client: openai.AsyncOpenAI, suite: tuple[Frontend, Path]
) -> None:
    secret = "xyzzyplugh"
    await client.completions.create(model=MODEL, prompt=f"{secret} {PROMPT}", max_tokens=5)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt=f"{secret} " * 40_000)
    for log in suite[1].iterdir():
        assert secret not in log.read_text(), os.fspath(log)
