"""Events and bodies as OpenAI's clients parse them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from controlplane.errors import (
    EngineFailed,
    InvalidRequest,
    Overloaded,
    TokenmillError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from engines.base import FinishReason, Usage
from services.frontend.openai_errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    ModelNotFound,
    error_body,
    error_headers,
)
from services.frontend.openai_responses import (
    ChatEvents,
    CompletionEvents,
    Events,
    WholeAnswer,
    chat_body,
    completion_body,
    usage_fields,
)
from services.frontend.tokenizer import Tokenizer
from tokenmill.decode.v1 import decode_pb2

TOKENIZER = Tokenizer.load("builtin")
AWKWARD = 'a "quoted"\n\\ 👋 \u2028 </script>'


def data_of(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


def position(*tokens: tuple[str, float]) -> decode_pb2.PositionLogprobs:
    return decode_pb2.PositionLogprobs(
        tokens=[
            decode_pb2.TokenLogprob(token_id=TOKENIZER.encode(text, add_special_tokens=False)[0], logprob=logprob)
            for text, logprob in tokens
        ]
    )


def chat_events(include_usage: bool = False) -> Events:
    return ChatEvents("chatcmpl-1", 'model"1', 2, include_usage, TOKENIZER)


def test_chat_events_are_openais_chunks() -> None:
    events = chat_events()
    opening = ChatCompletionChunk.model_validate(data_of(events.opening(1)), strict=True)
    assert (opening.choices[0].index, opening.choices[0].delta.role) == (1, "assistant")
    text = ChatCompletionChunk.model_validate(data_of(events.text(0, AWKWARD, ())), strict=True)
    assert (text.model, text.choices[0].delta.content, text.choices[0].finish_reason) == ('model"1', AWKWARD, None)
    ending = ChatCompletionChunk.model_validate(data_of(events.ending(0, FinishReason.LENGTH)), strict=True)
    assert ending.choices[0].finish_reason == "length"
    assert events.usage([Usage(1, 1)], 1) == b""


def test_usage_comes_in_an_event_of_its_own_when_asked_for() -> None:
    events = chat_events(include_usage=True)
    assert data_of(events.text(0, "x", ()))["usage"] is None
    last = data_of(events.usage([Usage(10, 3, 4, 6), Usage(10, 5, 10, 0)], 2))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
        "tokenmill": {"remote_tokens": 6},
    }


def test_every_prompt_counts_once_in_usage_and_every_choice_once() -> None:
    usages = [Usage(10, 1), Usage(10, 2), Usage(20, 3), Usage(20, 4)]
    assert (usage_fields(usages, 2)["prompt_tokens"], usage_fields(usages, 2)["completion_tokens"]) == (30, 10)


def test_chat_log_probabilities_have_text_bytes_and_alternatives() -> None:
    event = data_of(chat_events().text(0, " the", [position((" the", -0.5), (" the", -0.5), (" of", float("-inf")))]))
    chunk = ChatCompletionChunk.model_validate(event, strict=True)
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.content is not None
    token = chunk.choices[0].logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == (" the", -0.5, list(b" the"))
    assert [(other.token, other.logprob) for other in token.top_logprobs] == [(" the", -0.5), (" of", -9999.0)]


def test_completion_events_count_text_offsets_from_one_to_the_next() -> None:
    events = CompletionEvents("cmpl-1", "m", 1, False, TOKENIZER)
    first = data_of(events.text(0, " the", [position((" the", -1.0))]))["choices"][0]
    second = data_of(events.text(0, " of", [position((" of", -1.0), (" and", -2.0))]))["choices"][0]
    assert (first["text"], first["finish_reason"]) == (" the", None)
    assert (first["logprobs"]["text_offset"], second["logprobs"]["text_offset"]) == ([0], [4])
    assert second["logprobs"]["top_logprobs"] == [{" and": -2.0}]
    assert data_of(events.ending(0, FinishReason.STOP))["choices"][0]["finish_reason"] == "stop"
    assert events.opening(0) == b""


def test_whole_bodies_are_openais_objects() -> None:
    answer = WholeAnswer([AWKWARD], [position((" the", -1.0))], FinishReason.STOP, Usage(3, 2))
    chat = ChatCompletion.model_validate_json(chat_body("chatcmpl-1", "m", [answer], 1, TOKENIZER))
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (AWKWARD, "stop")
    assert chat.usage is not None
    assert chat.usage.total_tokens == 5
    completion = Completion.model_validate_json(completion_body("cmpl-1", "m", [answer, answer], 1, TOKENIZER))
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[1].text == AWKWARD


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("m", param="n"), "invalid_request_error", None),
        (Unsupported("m"), "invalid_request_error", "unsupported"),
        (ContextLengthExceeded("m"), "invalid_request_error", "context_length_exceeded"),
        (ModelNotFound("m"), "invalid_request_error", "model_not_found"),
        (BodyTooLarge("m"), "invalid_request_error", "request_too_large"),
        (Unauthenticated("m"), "authentication_error", "invalid_api_key"),
        (Overloaded("m"), "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("m"), "server_error", "unavailable"),
        (EngineFailed("m"), "server_error", "engine_failed"),
    ],
)
def test_errors_have_openais_shape(error: TokenmillError, kind: str, code: str | None) -> None:
    body = json.loads(error_body(error))["error"]
    assert body == {"message": "m", "type": kind, "param": error.param or None, "code": code}


def test_a_retry_hint_becomes_whole_seconds_and_is_never_zero() -> None:
    assert error_headers(Overloaded("m", retry_after_s=0.2)) == [(b"retry-after", b"1")]
    assert error_headers(Overloaded("m")) == [(b"retry-after", b"1")]
    assert error_headers(EngineFailed("m")) == []
