"""KV is held for a reader as long as anyone may read it, and not longer."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.errors import Unsupported
from engines.base import EngineRequest, FinishReason, SamplingParams
from tests.integration.engines.vllm_engine.prompts import Alone
from tests.integration.engines.vllm_engine.running import LEASE_S, Running, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]

BEFORE_EXPIRY_S = LEASE_S / 2
GREEDY = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)


async def test_release_frees_the_blocks_once(p: Running, alone: dict[str, Alone]) -> None:
    held = await p.prefill(alone["prefix, first"].prompt)
    load = p.engine.load()
    assert (load.kv_leases, load.kv_leased_blocks) == (1, 10)
    assert await p.engine.release(held.handle_id)
    assert not await p.engine.release(held.handle_id)
    await p.nothing_held(BEFORE_EXPIRY_S)
    assert not await p.engine.release("never heard of")


async def test_a_prefill_cancelled_half_way_holds_nothing(p: Running, alone: dict[str, Alone]) -> None:
    prefilling = asyncio.create_task(p.prefill(alone["1500 tokens"].prompt))
    await eventually(lambda: p.engine.load().queued_prefill_tokens > 0)
    prefilling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefilling
    await p.nothing_held(BEFORE_EXPIRY_S)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_prefill_cancelled_as_it_ends_holds_nothing(turns: int, p: Running, alone: dict[str, Alone]) -> None:
    prefilling = asyncio.create_task(p.prefill(alone["short"].prompt))
    await eventually(lambda: p.engine.load().kv_leases > 0 or prefilling.done())
    for _ in range(turns):
        await asyncio.sleep(0)
    prefilling.cancel()
    await asyncio.wait([prefilling])
    if not prefilling.cancelled():
        await p.engine.release(prefilling.result().handle_id)
    await p.nothing_held(BEFORE_EXPIRY_S)


async def test_aborting_a_prefill_by_its_id_ends_the_call(p: Running, alone: dict[str, Alone]) -> None:
    request = EngineRequest("prefill to abort", alone["1500 tokens"].prompt, SamplingParams())
    prefilling = asyncio.create_task(p.engine.prefill(request))
    await eventually(lambda: p.engine.abort(request.request_id))
    with pytest.raises(Exception, match="aborted"):
        await prefilling
    await p.nothing_held(BEFORE_EXPIRY_S)


@pytest.mark.parametrize("stage", ["admitted", "reading", "answering"])
async def test_an_abort_while_kv_is_handed_over_leaves_nothing_held(
    stage: str, p: Running, d: Running, alone: dict[str, Alone]
) -> None:
    # So that the engines know each other: without, the reader's notice goes out with its next step only.
    await d.answer(alone["short"].prompt, kv=await p.handle(alone["short"].prompt))
    case = alone["prefix, first"]
    kv = await p.handle(case.prompt)
    request_id, answer = await d.begin(case.prompt, GREEDY, kv)
    if stage == "reading":
        await eventually(lambda: p.engine.load().kv_leases == 0 or d.engine.load().waiting_requests > 0)
    elif stage == "answering":
        await eventually(lambda: len(answer.tokens) > 1)
    assert d.engine.abort(request_id)
    assert not d.engine.abort(request_id)
    await eventually(answer.ended.is_set)
    assert answer.last.finish is FinishReason.CANCELLED
    count = len(answer.tokens)
    await d.nothing_held(BEFORE_EXPIRY_S)
    await p.nothing_held(BEFORE_EXPIRY_S)
    assert len(answer.tokens) == count, "nothing comes after the end"


async def test_a_handle_nobody_read_is_released_by_its_holder(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    kv = await p.handle(alone["prefix, first"].prompt)
    assert await p.engine.release(kv.handle_id)
    await p.nothing_held(BEFORE_EXPIRY_S)
    answer = await d.answer(alone["prefix, first"].prompt, kv=kv)
    assert answer.tokens == alone["prefix, first"].answer


async def test_only_the_prefill_role_holds_kv(d: Running) -> None:
    with pytest.raises(Unsupported, match="decode role"):
        await d.prefill([1, 2, 3])
