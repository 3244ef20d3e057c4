"""OpenAI's own client against the frontend, unmodified."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from engines.sim.tokenizer import BUILTIN_EOS_TOKEN_ID
from tests.integration.frontend.peers import MAX_MODEL_LEN, TOKENIZER, Frontend, Live, ScriptedDecode, ids, serving
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = 'It\'s "naïve" 👋🏽 — 日本語\n\\end'


async def answer_text(live: Live) -> None:
    """One token a message, as a slow worker would."""
    tokens = ids(TEXT)
    for token_id in tokens:
        live.send([token_id])
    live.finish(tokens=len(tokens))


async def answer_with_logprobs(live: Live) -> None:
    for token_id in ids("the end"):
        batch = decode_pb2.StepBatch(slots=[live.request.slot], counts=[1], token_ids=[token_id])
        batch.logprobs.add(slot=live.request.slot).positions.add(
            tokens=[
                decode_pb2.TokenLogprob(token_id=token_id, logprob=-0.25),
                decode_pb2.TokenLogprob(token_id=token_id, logprob=-0.25),
                decode_pb2.TokenLogprob(token_id=BUILTIN_EOS_TOKEN_ID, logprob=-3.0),
            ]
        )
        live.stream.outgoing.put_nowait(batch)
    live.finish(tokens=len(ids("the end")))


async def answer_own_prompt(live: Live) -> None:
    live.send(live.request.prompt_token_ids)
    live.finish(common_pb2.FINISH_REASON_LENGTH, tokens=len(live.request.prompt_token_ids))


async def test_a_chat_is_answered_whole(frontend: Frontend, client: openai.AsyncOpenAI) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        chat = await client.chat.completions.create(model=worker.model, messages=HELLO, temperature=0, seed=7)
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(ids(prompt)), len(ids(TEXT)))
    assert chat.usage.total_tokens == len(ids(prompt)) + len(ids(TEXT))
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    asked = worker.requests[0].request
    assert list(asked.prompt_token_ids) == ids(prompt)
    assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.HasField("max_tokens")) == (0, 7, False)


async def test_a_chat_streams_whole_characters_and_ends_with_usage(
    frontend: Frontend, client: openai.AsyncOpenAI
) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        stream = await client.chat.completions.create(
            model=worker.model, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids(TEXT))
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_stream_too(frontend: Frontend, client: openai.AsyncOpenAI) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        stream = await client.completions.create(model=worker.model, prompt="say", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_several_prompts_and_choices_have_their_own_answers_in_order(
    frontend: Frontend, client: openai.AsyncOpenAI
) -> None:
    async with serving(frontend, ScriptedDecode(answer_own_prompt)) as worker:
        done = await client.completions.create(model=worker.model, prompt=["the one", "the other"], n=2, seed=5)
        stream = await client.completions.create(model=worker.model, prompt=[ids("a"), ids("b")], n=2, stream=True)
        texts = [""] * 4
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [(choice.index, choice.text) for choice in done.choices] == [
        (0, "the one"), (1, "the one"), (2, "the other"), (3, "the other"),
    ]  # fmt: skip
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids("the one")) + len(ids("the other"))
    assert done.usage.completion_tokens == 2 * done.usage.prompt_tokens
    assert texts == ["a", "a", "b", "b"]
    seeds = [live.request.sampling.seed for live in worker.requests[:4]]
    assert sorted(seeds) == [5, 5, 6, 6], "choices of one prompt must differ"
    assert len({live.request.request_id for live in worker.requests}) == 8


async def test_a_stop_string_across_tokens_ends_answer_worker_and_count(
    frontend: Frontend, client: openai.AsyncOpenAI
) -> None:
    async def go_on(live: Live) -> None:
        for token_id in ids("one two three"):
            live.send([token_id])

    async with serving(frontend, ScriptedDecode(go_on)) as worker:
        chat = await client.chat.completions.create(model=worker.model, messages=HELLO, stop=["o th", "\n"])
        stream = await client.chat.completions.create(
            model=worker.model, messages=HELLO, stop="o th", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one tw", "stop")
    # Up to the token that completes the stop string; " two" and " th" are one each.
    needed = next(n for n in range(1, 20) if "o th" in decoded(ids("one two three")[:n]))
    assert chat.usage is not None
    assert chat.usage.completion_tokens == needed
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 3, "the worker's last word is waited for"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one tw"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == needed
    assert set(worker.cancelled) == {live.request.request_id for live in worker.requests}


def decoded(token_ids: list[int]) -> str:
    detokenizer = TOKENIZER.detokenizer()
    return detokenizer.feed(token_ids) + detokenizer.finish()


async def test_log_probabilities_are_told_for_every_token(frontend: Frontend, client: openai.AsyncOpenAI) -> None:
    async with serving(frontend, ScriptedDecode(answer_with_logprobs)) as worker:
        chat = await client.chat.completions.create(model=worker.model, messages=HELLO, logprobs=True, top_logprobs=2)
        text = await client.completions.create(model=worker.model, prompt="x", logprobs=2)
    assert worker.requests[0].request.sampling.logprobs == 2
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert "".join(entry.token for entry in chat.choices[0].logprobs.content) == "the end"
    assert [other.token for other in chat.choices[0].logprobs.content[0].top_logprobs][1] == "<|im_end|>"
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    places = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all("the end".startswith(token, offset) for offset, token in places)


async def test_extensions_reach_the_worker(frontend: Frontend, client: openai.AsyncOpenAI) -> None:
    extensions = {"top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 2,
                  "stop_token_ids": [9], "priority": 3}  # fmt: skip
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        await client.chat.completions.create(
            model=worker.model, messages=HELLO, max_completion_tokens=50, extra_body=extensions
        )
    request = worker.requests[0].request
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    assert (sampling.ignore_eos, sampling.min_tokens, list(sampling.stop_token_ids)) == (True, 2, [9])
    assert (sampling.max_tokens, request.priority) == (50, 3)


async def test_models_are_listed_and_found(frontend: Frontend, client: openai.AsyncOpenAI) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        assert worker.model in [model.id async for model in client.models.list()]
        assert (await client.models.retrieve(worker.model)).id == worker.model
    with pytest.raises(openai.NotFoundError) as missing:
        await client.models.retrieve("nobody's")
    assert missing.value.code == "model_not_found"


async def test_a_known_model_without_a_worker_is_unavailable_and_not_unknown(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        pass
    while (answer := await http.get(f"/v1/models/{worker.model}")).status_code == 200:
        pass
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "try again later" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "status", "param", "code"),
    [
        ({"model": "nobody's"}, 404, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, 400, "messages", "context_length_exceeded"),
        ({"max_tokens": MAX_MODEL_LEN}, 400, "messages", "context_length_exceeded"),
        ({"max_tokens": -1}, 400, "max_tokens", None),
        ({"max_tokens": "many"}, 400, "max_tokens", None),
        ({"messages": "hello"}, 400, "messages", None),
        ({"temprature": 1}, 400, "temprature", None),
        ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported"),
        ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", None),
        ({"seed": 1}, 400, "seed", "unsupported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_request_is_refused_before_any_worker_hears_of_it(
    frontend: Frontend,
    http: httpx.AsyncClient,
    changes: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    async with serving(frontend, ScriptedDecode(answer_text), capabilities=()) as worker:
        body = {"model": worker.model, "messages": HELLO, "stream": stream} | changes
        answer = await http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert worker.requests == []


@pytest.mark.parametrize(
    ("prompt", "words"), [([10**6], "ids below"), ("", "no tokens"), (ids("a") * MAX_MODEL_LEN, "512 tokens")]
)
async def test_a_prompt_the_model_cannot_take_is_refused(
    frontend: Frontend, http: httpx.AsyncClient, prompt: Any, words: str
) -> None:
    async with serving(frontend, ScriptedDecode(answer_text)) as worker:
        answer = await http.post("/v1/completions", json={"model": worker.model, "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert words in answer.json()["error"]["message"]
    assert worker.requests == []


async def test_malformed_json_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", content=b'{"model": "m", ')
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]
    assert json.loads(answer.text)["error"]["type"] == "invalid_request_error"
