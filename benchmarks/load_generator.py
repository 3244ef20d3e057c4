"""Sends streamed chat requests to a frontend and prints what came back, as one JSON object.

Its own program, so that its CPU time is nobody else's. It reads no more of an event than it must.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import orjson
import uvloop
from tokenizers import Tokenizer

from engines.sim.tokenizer import builtin_tokenizer_json

TIMEOUT_S = 120.0


@dataclass(slots=True)
class Result:
    """Counts and times of one run."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    remote_tokens: int = 0
    """Prompt tokens whose KV came from a prefill worker."""
    events: int = 0
    elapsed_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)


def main() -> None:
    """Runs every request, a fixed number at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = make_prompts(arguments.requests, arguments.input_tokens, random.Random(arguments.seed))
    bodies = [request_body(arguments.model, prompt, arguments.output_tokens) for prompt in prompts]
    result = uvloop.run(send_all(arguments.url, bodies, arguments.streams))
    ttft = result.ttft_s
    summary = asdict(result) | {"ttft_s": statistics.median(ttft), "ttft_p99_s": sorted(ttft)[int(len(ttft) * 0.99)]}
    sys.stdout.buffer.write(orjson.dumps(summary) + b"\n")


def make_prompts(count: int, tokens: int, rng: random.Random) -> list[str]:
    """Texts of about this many tokens with the chat template around them; no two share a KV block beyond it."""
    tokenizer = Tokenizer.from_str(builtin_tokenizer_json())
    words = [word for word, i in tokenizer.get_vocab().items() if word.startswith("Ġ") and word[1:].isalpha()]
    words = [word.replace("Ġ", " ") for word in words if len(word) > 2]
    template_tokens = 19
    return ["".join(rng.choices(words, k=tokens - template_tokens)) for _ in range(count)]


def request_body(model: str, prompt: str, max_tokens: int) -> bytes:
    """A chat request that streams exactly `max_tokens` tokens."""
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def send_all(url: str, bodies: list[bytes], streams: int) -> Result:
    """Keeps `streams` connections busy until every body is answered."""
    result = Result()
    waiting = iter(bodies)
    began = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(_send_in_turn(url, waiting, result))
    result.elapsed_s = time.perf_counter() - began
    return result


async def _send_in_turn(url: str, waiting: Iterator[bytes], result: Result) -> None:
    host = urlsplit(url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    try:
        for body in waiting:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await _read_answer(reader, result, time.perf_counter())
    finally:
        writer.close()


async def _read_answer(reader: asyncio.StreamReader, result: Result, began: float) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"refused: {head!r} {await reader.read(1000)!r}")
    first = 0.0
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        now = time.perf_counter()
        if not first and b'"content":"' in chunk and b'"content":""' not in chunk:
            first = now
            result.ttft_s.append(first - began)
        result.events += chunk.count(b"data: ")
        if b'"usage":{' in chunk:
            _add_usage(chunk, result)
    await reader.readline()
    result.requests += 1


def _add_usage(chunk: bytes, result: Result) -> None:
    for line in chunk.split(b"\n\n"):
        if b'"usage":{' in line:
            usage = orjson.loads(line.removeprefix(b"data: "))["usage"]
            result.prompt_tokens += usage["prompt_tokens"]
            result.completion_tokens += usage["completion_tokens"]
            result.remote_tokens += (usage.get("tokenmill") or {}).get("remote_tokens", 0)


if __name__ == "__main__":
    main()
