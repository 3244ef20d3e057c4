"""What clients send: what is understood, and how what is not is refused."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from controlplane.errors import InvalidRequest, TokenmillError, Unsupported
from services.frontend.openai_requests import read_chat, read_completion

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hello"} | fields).encode()


def test_a_plain_chat_has_openais_defaults() -> None:
    request = read_chat(chat())
    options = request.options
    assert request.messages == HELLO
    assert (options.model, options.n, options.stream, options.stop) == ("m", 1, False, ())
    assert options.sampling.temperature == options.sampling.top_p == 1.0
    assert options.sampling.max_tokens is None
    assert options.sampling.logprobs is None


def test_every_sampling_field_and_extension_is_understood() -> None:
    request = read_chat(
        chat(
            max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, n=3, seed=-5,
            presence_penalty=-1, frequency_penalty=1.5, repetition_penalty=1.2, ignore_eos=True, min_tokens=2,
            stop_token_ids=[1, 2], stop=["a", "b"], stream=True, stream_options={"include_usage": True},
            logprobs=True, top_logprobs=4, user="u", metadata={"a": "b"}, priority=3, timeout_s=1.5,
            chat_template_kwargs={"thinking": False}, service_tier="auto", store=False, logit_bias={}, tools=[],
            response_format={"type": "text"}, parallel_tool_calls=True,
        )
    )  # fmt: skip
    options, sampling = request.options, request.options.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 0)
    assert (sampling.min_p, sampling.seed, sampling.min_tokens, sampling.logprobs) == (0.1, -5, 2, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.5, 1.2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (1, 2))
    assert (options.n, options.stop, options.stream, options.include_usage) == (3, ("a", "b"), True, True)
    assert (options.routing.priority, options.timeout_s) == (3, 1.5)
    assert request.template_arguments == {"thinking": False}


def test_null_means_the_default_as_for_openai() -> None:
    fields = ("max_tokens", "temperature", "stop", "n", "stream", "stream_options", "tools", "seed", "logprobs")
    assert read_chat(chat(**dict.fromkeys(fields))) == read_chat(chat())


def test_text_parts_are_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    request = read_chat(
        chat(messages=[{"role": "developer", "content": parts}, {"role": "assistant", "content": None}])
    )
    assert request.messages == [{"role": "system", "content": "hello"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [array("I", [1, 2])]),
        ([[1], [2, 3]], [array("I", [1]), array("I", [2, 3])]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(prompt: Any, expected: Any) -> None:
    assert read_completion(completion(prompt=prompt)).prompts == expected


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", "", "not valid JSON"),
        (b"[]", "", "must be a JSON object, not a list"),
        (b"\xff", "", "not valid JSON"),
        (b'{"messages": []}', "messages", "at least one"),
        (chat(model=None), "model", "missing"),
        (chat(model=7), "model", "7, and it must be a string"),
        (chat(messages=None), "messages", "missing"),
        (chat(messages="hi"), "messages", '"hi", and it must be a list'),
        (chat(messages=["hi"]), "messages[0]", "not a string"),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "not null"),
        (chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role", '"king", and it must be one of'),
        (chat(messages=[{"role": "user", "content": "x", "colour": 1}]), "messages[0].colour", "Unrecognized"),
        (chat(max_tokens=-1), "max_tokens", "-1, and it must be at least 1"),
        (chat(max_tokens=10**18), "max_tokens", "must be between 1 and 2147483647"),
        (chat(priority=2**31), "priority", "must be between -2147483648 and 2147483647"),
        (chat(**{"k" * 100_000: 1}), "k" * 60 + "…", "leave it out"),
        (b'{"messages": [{"role": "", "content": ""}]}', "messages[0].role", "must not be empty"),
        (chat(max_tokens=1.5), "max_tokens", "1.5, and it must be a whole number"),
        (chat(max_tokens="9"), "max_tokens", '"9", and it must be a whole number'),
        (chat(max_tokens=True), "max_tokens", "true, and it must be a whole number"),
        (chat(max_completion_tokens=0), "max_completion_tokens", "0, and it must be at least 1"),
        (chat(temperature=2.1), "temperature", "2.1, and it must be between 0 and 2"),
        (chat(temperature="hot"), "temperature", "must be a number"),
        (chat(top_p=0), "top_p", "0, and it must be above 0 and at most 1"),
        (chat(top_k=-2), "top_k", "-2"),
        (chat(n=0), "n", "0, and it must be between 1 and 128"),
        (chat(stream="yes"), "stream", '"yes", and it must be true or false'),
        (chat(stream_options={"include_usage": True}), "stream_options", "only allowed when stream is true"),
        (chat(stream=True, stream_options={"include_use": True}), "stream_options.include_use", "include_usage?"),
        (chat(stop=["a"] * 17), "stop", "17 strings; at most 16"),
        (chat(stop=""), "stop", "must have 1 to 1024 characters"),
        (chat(stop=[1]), "stop", "must be a string or a list of strings"),
        (chat(top_logprobs=2), "top_logprobs", "needs logprobs to be true"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "21, and it must be between 0 and 20"),
        (chat(seed=2**80), "seed", "must be a whole number"),
        (chat(stop_token_ids=["a"]), "stop_token_ids", "must be a list of token ids"),
        (chat(min_tokens=5, max_tokens=4), "min_tokens", "must not exceed max_tokens (4)"),
        (chat(timeout_s=0), "timeout_s", "above 0"),
        (chat(max_token=4), "max_token", "did you mean max_tokens?"),
        (chat(colour="blue"), "colour", "Unrecognized request argument supplied: colour; leave it out"),
        (completion(prompt=[]), "prompt", "not empty"),
        (completion(prompt=["a", 1]), "prompt", "must be a string"),
        (completion(prompt=[[1], []]), "prompt", "must be a string"),
        (completion(prompt=[-1]), "prompt", "no token id"),
        (completion(prompt=None), "prompt", "missing"),
        (completion(prompt=["a"] * 64, n=4), "prompt", "256 answers; at most 128"),
        (completion(logprobs=21), "logprobs", "between 0 and 20"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_field_value_and_remedy(body: bytes, param: str, words: str) -> None:
    read = read_completion if b'"prompt"' in body else read_chat
    with pytest.raises(InvalidRequest) as refused:
        read(body)
    assert refused.value.param == param
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(response_format={"type": "json_object"}), "response_format"),
        (chat(modalities=["audio"]), "modalities"),
        (chat(logit_bias={"5": 1}), "logit_bias"),
        (chat(store=True), "store"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0]",
        ),
        (chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls"),
        (completion(echo=True), "echo"),
        (completion(suffix="end"), "suffix"),
        (completion(best_of=2), "best_of"),
    ],
)
def test_what_is_not_served_is_refused_as_unsupported(body: bytes, param: str) -> None:
    read = read_completion if b'"prompt"' in body else read_chat
    with pytest.raises(Unsupported) as refused:
        read(body)
    assert refused.value.param == param


def test_an_error_shows_only_the_beginning_of_a_long_value() -> None:
    with pytest.raises(TokenmillError) as refused:
        read_chat(chat(seed="x" * 10_000))
    assert len(refused.value.message) < 200
