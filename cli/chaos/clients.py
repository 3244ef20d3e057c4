"""A client of the suite: asks one frontend one question, over HTTP or gRPC, and tells what it saw."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import httpx

from cli.chaos.asks import Ask, Face
from cli.chaos.checker import End, Seen
from cli.chaos.suite import Part
from controlplane.grpc_errors import from_rpc_error
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["Client", "Pieces"]

_DETAILS_KEY = "grpc-status-details-bin"
"""There when the frontend itself refused, not gRPC."""
_REFUSALS = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class Pieces:
    """What has come of one answer so far, and when: readable from outside while it comes."""

    began: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    finish: str = ""
    usage: tuple[int, int] | None = None
    last: float = 0.0
    worst_gap: tuple[float, float] = (0.0, 0.0)
    """From when to when nothing came; the wait for the first piece is one, too."""
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.began

    def add(self, text: str) -> None:
        """A piece has come."""
        now = time.monotonic()
        if now - self.last > self.worst_gap[1] - self.worst_gap[0]:
            self.worst_gap = self.last, now
        self.last = now
        self.texts.append(text)

    def seen(self, end: End, why: str = "") -> Seen:
        """As the checker wants it."""
        return Seen(end, "".join(self.texts), self.finish, self.usage, why)


class Client:
    """An async context manager. Safe for any number of questions at the same time."""

    def __init__(self, frontend: Part, model: str) -> None:
        self.frontend = frontend
        self._model = model
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # Idle connections are given up before the server does so, which could meet a request on its way.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=1.0)
        self._http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self.frontend.url, timeout=None, limits=limits, trust_env=False)
        )
        options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(self.frontend.address, options)
        self._grpc = inference_pb2_grpc.InferenceStub(await self._stack.enter_async_context(channel))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def ask(self, ask: Ask, pieces: Pieces, timeout_s: float) -> Seen:
        """Cancelled, it hangs up. `timeout_s`: what is left of the question's deadline."""
        try:
            if ask.face in (Face.GRPC, Face.GRPC_CHAT):
                return await self._over_grpc(ask, pieces, timeout_s)
            return await self._over_http(ask, pieces)
        except httpx.HTTPError as error:
            return pieces.seen(End.FRONTEND_GONE, f"{type(error).__name__} {error}".strip())

    async def _over_http(self, ask: Ask, pieces: Pieces) -> Seen:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if ask.face is Face.CHAT:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": ask.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", ask.prompt
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                return await self._refused(response, pieces)
            events = _events(response) if ask.stream else _whole(response)
            async for event in events:
                if "error" in event:
                    return pieces.seen(End.FAILED, f"after {len(pieces.texts)} pieces: {event['error']['message']}")
                _read(event, pieces)
        if not pieces.finish:
            return pieces.seen(End.FRONTEND_GONE, "the stream ended without a finish reason")
        return pieces.seen(End.COMPLETE)

    async def _refused(self, response: httpx.Response, pieces: Pieces) -> Seen:
        said = (await response.aread()).decode(errors="replace")[:300]
        why = f"HTTP {response.status_code}: {said}"
        if response.status_code in _REFUSALS and "retry-after" in response.headers:
            pieces.retry_after_s = float(response.headers["retry-after"])
            return pieces.seen(End.REFUSED, why)
        return pieces.seen(End.FAILED, why)

    async def _over_grpc(self, ask: Ask, pieces: Pieces, timeout_s: float) -> Seen:
        sampling = common_pb2.Sampling(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True)
        call: AsyncIterable[inference_pb2.GenerateResponse]
        if ask.face is Face.GRPC_CHAT:
            message = inference_pb2.Message(role="user", content=ask.prompt)
            chat = inference_pb2.ChatRequest(model=self._model, messages=[message], sampling=sampling)
            call = self._grpc.Chat(chat, timeout=timeout_s)
        else:
            generate = inference_pb2.GenerateRequest(model=self._model, prompt=ask.prompt, sampling=sampling)
            call = self._grpc.Generate(generate, timeout=timeout_s)
        try:
            async for response in call:
                if response.text:
                    pieces.add(response.text)
                if response.finish_reason:
                    name = common_pb2.FinishReason.Name(response.finish_reason)
                    pieces.finish = name.removeprefix("FINISH_REASON_").lower()
                    pieces.usage = response.usage.prompt_tokens, response.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            return _grpc_end(error, pieces)
        return pieces.seen(End.COMPLETE)


def _grpc_end(error: grpc.aio.AioRpcError, pieces: Pieces) -> Seen:
    why = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return pieces.seen(End.TIMED_OUT, why)
    ours = any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    if not ours and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        return pieces.seen(End.FRONTEND_GONE, why)
    pieces.retry_after_s = from_rpc_error(error).retry_after_s
    refused = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return pieces.seen(End.REFUSED if refused and pieces.retry_after_s and not pieces.texts else End.FAILED, why)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def _whole(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    yield json.loads(await response.aread())


def _read(event: dict[str, Any], pieces: Pieces) -> None:
    for choice in event["choices"]:
        source = choice.get("delta") or choice.get("message") or {}
        text = source.get("content") or choice.get("text") or ""
        if text:
            pieces.add(text)
        pieces.finish = choice.get("finish_reason") or pieces.finish
    if usage := event.get("usage"):
        pieces.usage = usage["prompt_tokens"], usage["completion_tokens"]
