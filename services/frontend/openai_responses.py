"""Answers as OpenAI's clients expect them, whole or as server-sent events.

An event is a prefix and a suffix made once for each request, with the new text between them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engines.base import FinishReason, Usage
from services.frontend.answer import Logprobs
from services.frontend.tokenizer import Tokenizer

__all__ = [
    "DONE",
    "ChatEvents",
    "CompletionEvents",
    "Events",
    "WholeAnswer",
    "chat_body",
    "completion_body",
    "usage_fields",
]

DONE = b"data: [DONE]\n\n"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class WholeAnswer:
    """One choice, gathered."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    usage: Usage = field(default_factory=lambda: Usage(0, 0))


class Events(Protocol):
    """How one kind of request streams."""

    def opening(self, index: int) -> bytes:
        """Before a choice's first text; may be empty."""

    def text(self, index: int, text: str, logprobs: Logprobs) -> bytes:
        """One event with new text."""

    def ending(self, index: int, reason: FinishReason) -> bytes:
        """The last event of a choice."""

    def usage(self, usages: Sequence[Usage], n: int) -> bytes:
        """The event after all choices; empty when it was not asked for."""


class _EventFrame:
    """What the events of one request have in common."""

    def __init__(self, kind: str, response_id: str, model: str, include_usage: bool) -> None:
        head = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._include_usage = include_usage
        self._close = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def usage(self, usages: Sequence[Usage], n: int) -> bytes:
        """See `Events`."""
        if not self._include_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage_fields(usages, n)) + b"}\n\n"


class ChatEvents(_EventFrame):
    """chat.completion.chunk."""

    def __init__(self, response_id: str, model: str, choices: int, include_usage: bool, tokenizer: Tokenizer) -> None:
        super().__init__("chat.completion.chunk", response_id, model, include_usage)
        self._tokenizer = tokenizer
        self._choice = [self._head + b',"choices":[{"index":%d,"delta":' % index for index in range(choices)]
        self._before_text = [choice + b'{"content":' for choice in self._choice]
        self._after_text = b'},"logprobs":null,"finish_reason":null}]' + self._close

    def opening(self, index: int) -> bytes:
        """The assistant's turn begins."""
        return self._choice[index] + b'{"role":"assistant","content":""' + self._after_text

    def text(self, index: int, text: str, logprobs: Logprobs) -> bytes:
        """See `Events`."""
        if not logprobs:
            return self._before_text[index] + orjson.dumps(text) + self._after_text
        details = orjson.dumps({"content": _chat_logprobs(self._tokenizer, logprobs)})
        known = b'},"logprobs":' + details + b',"finish_reason":null}]'
        return self._before_text[index] + orjson.dumps(text) + known + self._close

    def ending(self, index: int, reason: FinishReason) -> bytes:
        """See `Events`."""
        return self._choice[index] + b'{},"logprobs":null,"finish_reason":"%b"}]' % _name(reason) + self._close


class CompletionEvents(_EventFrame):
    """text_completion."""

    def __init__(self, response_id: str, model: str, choices: int, include_usage: bool, tokenizer: Tokenizer) -> None:
        super().__init__("text_completion", response_id, model, include_usage)
        self._tokenizer = tokenizer
        self._offsets = [0] * choices
        self._before_text = [self._head + b',"choices":[{"index":%d,"text":' % index for index in range(choices)]
        self._after_text = b',"logprobs":null,"finish_reason":null}]' + self._close

    def opening(self, index: int) -> bytes:
        """Nothing."""
        return b""

    def text(self, index: int, text: str, logprobs: Logprobs) -> bytes:
        """See `Events`."""
        if not logprobs:
            return self._before_text[index] + orjson.dumps(text) + self._after_text
        details = _completion_logprobs(self._tokenizer, logprobs, self._offsets[index])
        self._offsets[index] += sum(map(len, details["tokens"]))
        known = b',"logprobs":' + orjson.dumps(details) + b',"finish_reason":null}]'
        return self._before_text[index] + orjson.dumps(text) + known + self._close

    def ending(self, index: int, reason: FinishReason) -> bytes:
        """See `Events`."""
        return self._before_text[index] + b'"","logprobs":null,"finish_reason":"%b"}]' % _name(reason) + self._close


def chat_body(response_id: str, model: str, answers: Sequence[WholeAnswer], n: int, tokenizer: Tokenizer) -> bytes:
    """chat.completion."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.texts), "refusal": None},
            "logprobs": {"content": _chat_logprobs(tokenizer, answer.logprobs)} if answer.logprobs else None,
            "finish_reason": _REASONS[answer.reason],
        }
        for index, answer in enumerate(answers)
    ]
    return _body("chat.completion", response_id, model, choices, usage_fields([answer.usage for answer in answers], n))


def completion_body(
    response_id: str, model: str, answers: Sequence[WholeAnswer], n: int, tokenizer: Tokenizer
) -> bytes:
    """text_completion."""
    choices = [
        {
            "index": index,
            "text": "".join(answer.texts),
            "logprobs": _completion_logprobs(tokenizer, answer.logprobs, 0) if answer.logprobs else None,
            "finish_reason": _REASONS[answer.reason],
        }
        for index, answer in enumerate(answers)
    ]
    return _body("text_completion", response_id, model, choices, usage_fields([answer.usage for answer in answers], n))


def usage_fields(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """Of all choices together. A prompt counts once, however many choices (`n`, one after the other) it has."""
    of_prompts = usages[::n]
    prompt = sum(usage.prompt_tokens for usage in of_prompts)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in of_prompts)},
        "tokenmill": {"remote_tokens": sum(usage.remote_tokens for usage in of_prompts)},
    }


def _body(kind: str, response_id: str, model: str, choices: list[Any], usage: dict[str, Any]) -> bytes:
    return orjson.dumps(
        {
            "id": response_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage,
        }
    )


def _name(reason: FinishReason) -> bytes:
    return _REASONS[reason].encode()


def _chat_logprobs(tokenizer: Tokenizer, positions: Logprobs) -> list[dict[str, Any]]:
    entries = []
    for position in positions:
        tokens = [
            {"token": data.decode(errors="replace"), "logprob": _finite(token.logprob), "bytes": list(data)}
            for token in position.tokens
            for data in (tokenizer.token_bytes(token.token_id),)
        ]
        entries.append({**tokens[0], "top_logprobs": tokens[1:]})
    return entries


def _completion_logprobs(tokenizer: Tokenizer, positions: Logprobs, offset: int) -> dict[str, Any]:
    texts, chosen, best, offsets = [], [], [], []
    for position in positions:
        tokens = [
            (tokenizer.token_bytes(token.token_id).decode(errors="replace"), _finite(token.logprob))
            for token in position.tokens
        ]
        texts.append(tokens[0][0])
        chosen.append(tokens[0][1])
        best.append(dict(tokens[1:]))
        offsets.append(offset)
        offset += len(tokens[0][0])
    return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 is what OpenAI says for "very unlikely"."""
    return max(logprob, -9999.0)
