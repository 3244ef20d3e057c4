"""What an engine gives for one request or many, without any hand-off."""

from __future__ import annotations

import asyncio
import math

import pytest

from controlplane.errors import InvalidRequest
from engines.base import EngineRequest, FinishReason, SamplingParams
from tests.integration.engines.vllm_engine.prompts import EIGHT, Alone
from tests.integration.engines.vllm_engine.running import Answer, Running, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]


async def finished(running: Running, tokens: list[int], sampling: SamplingParams) -> Answer:
    _, answer = await running.begin(tokens, sampling)
    await eventually(answer.ended.is_set)
    return answer


async def test_one_call_of_the_sink_brings_all_that_a_step_gave(d: Running, alone: dict[str, Alone]) -> None:
    d.batches.clear()
    await asyncio.gather(*(d.answer(alone[name].prompt, max_tokens=32) for name in EIGHT))
    tokens = sum(len(output.token_ids) for batch in d.batches for output in batch)
    assert tokens == 8 * 32
    assert max(len(batch) for batch in d.batches) == 8
    assert len(d.batches) <= 32 + 8, "more calls than steps"
    for batch in d.batches:
        assert len({output.request_id for output in batch}) == len(batch)


async def test_usage_counts_prompt_answer_and_what_was_cached(d: Running, alone: dict[str, Alone]) -> None:
    prompt = alone["prefix, first"].prompt
    first = await d.answer(prompt, max_tokens=3)
    second = await d.answer(prompt, max_tokens=3)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(prompt), 3)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, len(prompt) // 32 * 32)


async def test_an_answer_ends_at_a_stop_token_or_the_models_own_end(d: Running, alone: dict[str, Alone]) -> None:
    case = alone["short"]
    stop = case.answer[2]
    answer = await finished(
        d, case.prompt, SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(stop,), ignore_eos=True)
    )
    assert (answer.tokens, answer.last.finish) == (case.answer[: case.answer.index(stop) + 1], FinishReason.STOP)
    chat = await finished(d, alone["chat"].prompt, SamplingParams(max_tokens=200, temperature=0))
    assert chat.last.finish is FinishReason.STOP
    assert chat.tokens[-1] in d.info.eos_token_ids


async def test_logprobs_name_the_chosen_token_and_then_the_best(d: Running, alone: dict[str, Alone]) -> None:
    case = alone["short"]
    _, answer = await d.begin(case.prompt, SamplingParams(max_tokens=4, temperature=0.0, logprobs=3))
    await eventually(answer.ended.is_set)
    positions = [position for step in answer.steps for position in step.logprobs or ()]
    assert [position[0].token_id for position in positions] == answer.tokens
    for chosen, *best in positions:
        assert len(best) == 3
        assert best[0] == chosen, "greedy"
        assert sorted(best, key=lambda entry: -entry.logprob) == best
        assert sum(math.exp(entry.logprob) for entry in best) <= 1


async def test_a_seed_repeats_an_answer(d: Running, alone: dict[str, Alone]) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    first, second, other = [
        await finished(d, alone["short"].prompt, each)
        for each in (sampling, sampling, SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True))
    ]
    assert first.tokens == second.tokens != other.tokens


async def test_what_cannot_be_served_is_refused_before_it_is_admitted(d: Running, alone: dict[str, Alone]) -> None:
    with pytest.raises(InvalidRequest):
        await d.begin([5] * (d.info.max_model_len + 1), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest):
        await d.begin([d.info.vocab_size + 1000], SamplingParams(max_tokens=1))
    request_id, answer = await d.begin(alone["short"].prompt, SamplingParams(max_tokens=300, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="running already"):
        await d.engine.generate(EngineRequest(request_id, [1], SamplingParams()), d.sink)
    d.engine.abort(request_id)
    await eventually(answer.ended.is_set)
    assert not d.engine.abort("never heard of")


async def test_a_higher_priority_runs_first(d: Running, alone: dict[str, Alone]) -> None:
    prompt = alone["1500 tokens"].prompt
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    pending = [
        (await d.begin([token, *prompt], sampling, priority=priority))
        for token, priority in ((1, 9), (5, 0), (6, 0), (8, 0), (9, 0), (7, 5))
    ]
    for _, answer in pending:
        await eventually(answer.ended.is_set)
    ids = [request_id for request_id, _ in pending]
    ended_in = {output.request_id: step for step, batch in enumerate(d.batches) for output in batch if output.finish}
    assert ended_in[ids[-1]] < ended_in[ids[-2]], "the last to come overtakes those that still wait"


async def test_load_shows_what_runs_and_that_it_moves(d: Running, alone: dict[str, Alone]) -> None:
    before = d.engine.load()
    assert (before.running_requests, before.kv_used_blocks) == (0, 0)
    request_id, answer = await d.begin(
        alone["prefix, first"].prompt, SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    )
    assert d.engine.load().queued_prefill_tokens == len(alone["prefix, first"].prompt)
    await eventually(lambda: len(answer.tokens) > 3)
    load = d.engine.load()
    assert (load.running_requests, load.queued_prefill_tokens) == (1, 0)
    assert load.steps >= before.steps + 4
    assert 0 < load.step_time_s < 10
    assert 10 <= load.kv_used_blocks <= 11
    assert load.kv_total_blocks == d.info.total_blocks
    d.engine.abort(request_id)
    await d.nothing_held()
