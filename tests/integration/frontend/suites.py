"""A real suite on the simulated engine, and answers in the making whose every token is known."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engines.sim.tokenizer import builtin_tokenizer_json
from tests.integration.frontend.peers import Frontend
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2

MODEL = "halves"
TOKENS = 250
"""Two seconds and more at the simulated engine's 8 ms a step."""

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


def write_tokenizer(directory: Path) -> None:
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


def body_of(number: int, stop: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "prompt": f"{number} river " * 9, "max_tokens": TOKENS, "temperature": 0}
    return body | ({"stop": [stop]} if stop else {})


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


class Load:
    """Answers in the making; `begun` counts the streams over HTTP and gRPC that have some text."""

    def __init__(self, http: httpx.AsyncClient, stub: Any) -> None:
        self._http = http
        self._stub = stub
        self.begun = 0
        self.longest_gap_s = 0.0
        """Between two lines of a stream over HTTP."""

    async def over_http(self, body: dict[str, Any]) -> Outcome:
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        text, reason = "", ""
        usage: dict[str, int] = {}
        last_at = math.inf
        async with self._http.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - last_at)
                last_at = now
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
            model=MODEL,
            prompt=body["prompt"],
            sampling=common_pb2.Sampling(max_tokens=TOKENS, temperature=0),
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
        return await whole(self._http, body)


async def counted(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
