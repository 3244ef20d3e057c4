"""What the command line needs of the OpenAI HTTP API: the models served, and a streamed chat answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from controlplane.errors import InvalidRequest, NotFound, TokenmillError, Unavailable

__all__ = ["Message", "OpenAiClient", "StreamUsage"]

Message = Mapping[str, str]
"""{"role": "user", "content": "..."}"""

# A long prompt on a CPU may take minutes before its first token.
_TIMEOUT = httpx.Timeout(5.0, read=600.0)
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Token counts of one answer. `remote_tokens`: prompt tokens whose KV came from a prefill worker, verified."""

    prompt_tokens: int
    completion_tokens: int
    remote_tokens: int


class OpenAiClient:
    """An async context manager. Raises `Unavailable` when nobody answers, else what the server says."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.usage: StreamUsage | None = None
        """Of the last answer that came to its end."""
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=_TIMEOUT,
            # A proxy of this machine's environment has no business between two of its processes.
            trust_env=httpx.URL(self.url).host not in _LOCAL,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names of the models served now."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response.status_code, response.content)
        return [model["id"] for model in response.json()["data"]]

    def chat(
        self, model: str, messages: Sequence[Message], *, max_tokens: int | None, temperature: float | None = None
    ) -> AsyncGenerator[str, None]:
        """The answer's text as it comes; `usage` is set at its end. Closing the iterator cancels the request."""
        request = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        return self._stream("/v1/chat/completions", request)

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> AsyncGenerator[str, None]:
        """As `chat`, of a plain text to go on with: any model can do that."""
        return self._stream("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": max_tokens})

    async def _stream(self, path: str, wanted: dict[str, Any]) -> AsyncGenerator[str, None]:
        self.usage = None
        request = {name: value for name, value in wanted.items() if value is not None}
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", path, json=request) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for text in self._read_event(json.loads(line.removeprefix("data: "))):
                            yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _read_event(self, event: dict[str, Any]) -> list[str]:
        if "error" in event:
            raise Unavailable(event["error"]["message"])
        if usage := event.get("usage"):
            extension = usage.get("tokenmill") or {}
            self.usage = StreamUsage(
                usage["prompt_tokens"], usage["completion_tokens"], extension.get("remote_tokens", 0)
            )
        choices = event["choices"]
        return [choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices]

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"no answer from {self.url}: {str(error) or type(error).__name__}")


def _refusal(status: int, body: bytes) -> TokenmillError:
    """The error an OpenAI body tells of."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {status}: {body[:200].decode(errors='replace')}"
    if status == httpx.codes.NOT_FOUND:
        return NotFound(message)
    return InvalidRequest(message) if status < httpx.codes.INTERNAL_SERVER_ERROR else Unavailable(message)
