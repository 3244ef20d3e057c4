"""KV computed by one engine and read by another: the answer is that of one engine alone, whatever goes wrong."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from engines.base import FinishReason, KvOutcome, Role, SamplingParams
from tests.integration.engines.vllm_engine.prompts import EIGHT, NAMES, Alone
from tests.integration.engines.vllm_engine.running import LEASE_S, Engines, Running, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]


@pytest.mark.parametrize("name", NAMES)
async def test_the_answer_is_that_of_one_engine_alone(
    name: str, p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    case = alone[name]
    assert case.margin > 1e-3, "rounding may decide this prompt's answer: choose another"
    kv = await p.handle(case.prompt)
    assert kv.tokens == len(case.prompt)
    answer = await d.answer(case.prompt, kv=kv)
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.READ)
    assert (answer.usage.cached_tokens, answer.usage.remote_tokens) == (0, len(case.prompt))
    await p.nothing_held(LEASE_S / 2)
    assert p.engine.load().kv_leases_expired == 0


async def test_eight_answers_at_once_are_those_of_one_engine_alone(
    p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    cases = [alone[name] for name in EIGHT]

    async def hand_over(case: Alone) -> tuple[list[int], KvOutcome]:
        answer = await d.answer(case.prompt, kv=await p.handle(case.prompt))
        return answer.tokens, answer.outcome

    assert await asyncio.gather(*map(hand_over, cases)) == [(case.answer, KvOutcome.READ) for case in cases]


async def test_only_what_the_reader_lacks_is_read(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    first, second = alone["prefix, first"], alone["prefix, second"]
    await d.answer(first.prompt, kv=await p.handle(first.prompt))
    answer = await d.answer(second.prompt, kv=await p.handle(second.prompt))
    assert (answer.tokens, answer.outcome) == (second.answer, KvOutcome.READ)
    assert (answer.usage.cached_tokens, answer.usage.remote_tokens) == (288, len(second.prompt) - 288)


async def test_a_corrupted_block_is_computed_here_instead(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["prefix, first"]
    await p.engine.inject_fault("corrupt-block")
    answer = await d.answer(case.prompt, kv=await p.handle(case.prompt))
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.CORRUPT)
    assert (answer.usage.cached_tokens, answer.usage.remote_tokens) == (0, 0)


async def test_a_read_that_ends_after_the_lease_is_not_used(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["prefix, first"]
    await d.engine.inject_fault("late-read")
    kv = await p.handle(case.prompt)
    answering = asyncio.create_task(d.answer(case.prompt, kv=kv))
    await p.nothing_held(2 * LEASE_S)
    answer = await answering
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.LATE)


async def test_an_expired_handle_is_not_read(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    warm, case = alone["short"], alone["prefix, first"]
    await d.answer(warm.prompt, kv=await p.handle(warm.prompt))  # so that both know each other's clock
    await p.nothing_held()
    expired = p.engine.load().kv_leases_expired
    kv = await p.handle(case.prompt)
    assert 0 < kv.lease_s <= LEASE_S
    assert p.engine.load().kv_leased_blocks > 0
    await p.nothing_held(2 * LEASE_S)
    assert p.engine.load().kv_leases_expired == expired + 1
    answer = await d.answer(case.prompt, kv=kv)
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.LATE)


async def test_a_handle_that_makes_no_sense_is_not_used(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["short"]
    kv = await p.handle(case.prompt)
    for broken in (replace(kv, engine_params=b"\xc1"), replace(kv, digests=())):
        answer = await d.answer(case.prompt, kv=broken)
        assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.CORRUPT)
    assert await p.engine.release(kv.handle_id)


async def test_kv_of_another_prompt_is_not_used(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["prefix, first"]
    foreign = await p.handle([case.prompt[0] + 1, *case.prompt[1:]])
    answer = await d.answer(case.prompt, kv=foreign)
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.CORRUPT)
    assert await p.engine.release(foreign.handle_id)


async def test_kv_of_another_block_size_is_never_read(p: Running, engines: Engines, alone: dict[str, Alone]) -> None:
    case = alone["prefix, first"]
    async with engines.use(Role.DECODE, block_size=64) as d64:
        kv = await p.handle(case.prompt)
        answer = await d64.answer(case.prompt, kv=kv)
        assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.INCOMPATIBLE)
        # Nor when someone claims that it fits: the handshake between the workers says no.
        assert await d64.engine.reset_prefix_cache()
        answer = await d64.answer(case.prompt, kv=replace(kv, format=d64.info.format))
        assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.INCOMPATIBLE)
        await p.engine.release(kv.handle_id)


async def test_a_killed_prefill_engine_costs_time_only(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    warm, case = alone["short"], alone["prefix, first"]
    await d.answer(warm.prompt, kv=await p.handle(warm.prompt))
    kv = await p.handle(case.prompt)
    await p.kill()
    answer = await d.answer(case.prompt, kv=kv)
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.UNREACHABLE)


async def test_a_prefill_engine_killed_before_we_met_costs_no_handshake_timeout(
    p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    case = alone["prefix, first"]
    kv = await p.handle(case.prompt)
    await p.kill()
    began = time.monotonic()
    answer = await d.answer(case.prompt, kv=kv)
    assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.UNREACHABLE)
    took_s = time.monotonic() - began
    assert await d.engine.reset_prefix_cache()
    began = time.monotonic()
    await d.answer(case.prompt)
    alone_s = time.monotonic() - began
    assert took_s < 5 + 3 * alone_s, "vLLM's own handshake alone waits 5 s for a dead peer, on a machine however fast"


async def test_a_prefill_engine_that_stands_still_costs_the_read_timeout_and_its_late_bytes_do_no_harm(
    p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    warm, case, other = alone["short"], alone["prefix, first"], alone["prefix, second"]
    await d.answer(warm.prompt, kv=await p.handle(warm.prompt))
    kv = await p.handle(case.prompt)
    with p.stopped():
        answer = await d.answer(case.prompt, kv=kv)
        assert (answer.tokens, answer.outcome) == (case.answer, KvOutcome.UNREACHABLE)
        assert answer.usage.remote_tokens == 0
        assert d.engine.load().kv_used_blocks > 0, "the blocks that bytes may still come into are not given away"
    await d.nothing_held()  # the read has ended now
    await p.nothing_held(2 * LEASE_S)
    for again in (case, other):
        assert (await d.answer(again.prompt)).tokens == again.answer


async def test_a_request_that_waits_for_an_engine_that_stands_still_can_be_cancelled(
    p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    warm, case = alone["short"], alone["prefix, first"]
    await d.answer(warm.prompt, kv=await p.handle(warm.prompt))
    kv = await p.handle(case.prompt)
    with p.stopped():
        request_id, answer = await d.begin(case.prompt, SamplingParams(max_tokens=16, temperature=0.0), kv)
        await asyncio.sleep(0.5)
        assert d.engine.abort(request_id)
        await eventually(answer.ended.is_set, 2)
        assert answer.last.finish is FinishReason.CANCELLED
    await d.nothing_held()
