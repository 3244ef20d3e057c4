"""Prefill here, decode there: two real processes and real NIXL. Whatever goes wrong, the answer is the same."""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from engines.base import FinishReason, Handle, KvOutcome, StepOutput
from engines.sim.tokens import TokenSource, builtin_vocabulary
from tests.integration.engines.sim.running import Engine, PrefillWorker, until

Start = Callable[..., PrefillWorker]

PROMPT = list(range(1000))
READABLE = 62 * 16
"""62 full blocks before the last token."""


def expected(prompt: list[int], count: int = 8) -> list[int]:
    source = TokenSource(builtin_vocabulary(), array("I", prompt), 0, 0)
    return [source.next(True) for _ in range(count)]


async def hand_over(engine: Engine, handle: Handle, prompt: list[int] = PROMPT) -> StepOutput:
    """The last output of an answer that is right."""
    tokens, last = await engine.answer(handle.handle_id, prompt, kv=handle)
    assert tokens == expected(prompt)
    engine.sim._scheduler.check_integrity()
    return last


async def all_released(worker: PrefillWorker) -> None:
    async with asyncio.timeout(60):
        while await worker.leases() or await worker.used_blocks():  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)


async def test_blocks_are_read_verified_and_freed(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    last = await hand_over(engine, await worker.prefill(PROMPT))
    assert last.kv_outcome is KvOutcome.READ
    assert last.usage is not None
    assert last.usage.remote_tokens == READABLE
    assert last.usage.cached_tokens == 0
    await all_released(worker)
    assert engine.sim.load().kv_used_blocks == 0


async def test_only_what_the_own_cache_lacks_is_read(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    await engine.answer("before", PROMPT[:160])
    last = await hand_over(engine, await worker.prefill(PROMPT))
    assert last.kv_outcome is KvOutcome.READ
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.remote_tokens) == (160, READABLE - 160)


async def test_what_the_own_cache_has_is_declined_and_freed(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    await engine.answer("before", PROMPT)
    last = await hand_over(engine, await worker.prefill(PROMPT))
    assert last.kv_outcome is KvOutcome.LOCAL
    await all_released(worker)


async def test_a_prompt_without_a_full_block_travels_as_nothing(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    handle = await worker.prefill([1, 2, 3])
    assert handle.tokens == 0
    last = await hand_over(engine, handle, [1, 2, 3])
    assert last.kv_outcome is KvOutcome.LOCAL
    await all_released(worker)


async def test_many_at_once(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    prompts = [[n] * 200 for n in range(20)]
    handles = [await worker.prefill(prompt) for prompt in prompts]
    lasts = await asyncio.gather(*(hand_over(engine, h, p) for h, p in zip(handles, prompts, strict=True)))
    assert {last.kv_outcome for last in lasts} == {KvOutcome.READ}
    await all_released(worker)


async def test_a_corrupt_block_is_thrown_away(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker(fault="corrupt-block")
    last = await hand_over(engine, await worker.prefill(PROMPT))
    assert last.kv_outcome is KvOutcome.CORRUPT
    assert last.usage is not None
    assert last.usage.remote_tokens == 0
    await all_released(worker)


async def test_right_bytes_of_another_prompt_are_thrown_away(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    other = await worker.prefill([7] * 1000)
    last = await hand_over(engine, other)
    assert last.kv_outcome is KvOutcome.CORRUPT


async def test_a_read_after_the_leases_end_is_thrown_away(prefill_worker: Start) -> None:
    worker = prefill_worker(lease_s=0.5, total_blocks=130)
    async with Engine(fault="late-read") as engine:
        handle = await worker.prefill(PROMPT)
        end = await engine.submit("a", PROMPT, kv=handle)
        await all_released(worker)
        await worker.prefill([9] * 1000)  # its blocks are those that were held
        async with asyncio.timeout(60):
            outputs = await end
    assert [token for output in outputs for token in output.token_ids] == expected(PROMPT)
    assert outputs[-1].kv_outcome is KvOutcome.LATE


async def test_a_lease_that_has_ended_is_not_tried(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    handle = await worker.prefill(PROMPT)
    last = await hand_over(engine, replace(handle, received_at=handle.received_at - handle.lease_s))
    assert last.kv_outcome is KvOutcome.LATE


async def test_a_prefill_worker_that_was_killed_is_unreachable(prefill_worker: Start, engine: Engine) -> None:
    worker = prefill_worker()
    first, second = await worker.prefill(PROMPT), await worker.prefill([5] * 500)
    assert (await hand_over(engine, first)).kv_outcome is KvOutcome.READ
    worker.process.kill()
    worker.process.wait()
    assert (await hand_over(engine, second, [5] * 500)).kv_outcome is KvOutcome.UNREACHABLE
    other = prefill_worker()
    assert (await hand_over(engine, await other.prefill([6] * 500), [6] * 500)).kv_outcome is KvOutcome.READ


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
async def test_a_prefill_worker_that_stalls_in_a_read_costs_its_timeout_and_no_block(
    monkeypatch: pytest.MonkeyPatch, prefill_worker: Start, then: signal.Signals
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # over shared memory a stopped process can still be read
    worker = prefill_worker()
    async with Engine(read_timeout_s=0.5) as engine:
        first, second = await worker.prefill(PROMPT), await worker.prefill([5] * 500)
        worker.process.send_signal(signal.SIGSTOP)
        assert (await hand_over(engine, first)).kv_outcome is KvOutcome.UNREACHABLE
        assert engine.sim.load().kv_used_blocks == 63, "the destination waits for the transfer's end"
        last = await hand_over(engine, second, [5] * 500)
        assert last.kv_outcome is KvOutcome.UNREACHABLE
        worker.process.send_signal(then)
        await until(lambda: engine.sim.load().kv_used_blocks == 0)
        engine.sim._scheduler.check_integrity()


async def test_an_abort_during_a_read_frees_both_sides(monkeypatch: pytest.MonkeyPatch, prefill_worker: Start) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    worker = prefill_worker()
    async with Engine() as engine:
        handle = await worker.prefill(PROMPT)
        worker.process.send_signal(signal.SIGSTOP)
        end = await engine.submit("a", PROMPT, kv=handle)
        await until(lambda: engine.sim.load().kv_used_blocks > 0)
        assert engine.sim.abort("a")
        assert (await end)[-1].finish is FinishReason.CANCELLED
        assert engine.sim.load().kv_used_blocks > 0
        worker.process.send_signal(signal.SIGCONT)
        await until(lambda: engine.sim.load().kv_used_blocks == 0)
        await all_released(worker)


async def test_a_handle_of_another_format_or_without_sense_is_incompatible(
    prefill_worker: Start, engine: Engine
) -> None:
    worker = prefill_worker()
    handle = await worker.prefill(PROMPT)
    for wrong in (
        replace(handle, format=replace(handle.format, block_size=32)),
        replace(handle, engine_params=b"nonsense"),
        replace(handle, digests=handle.digests[1:]),
    ):
        assert (await hand_over(engine, wrong)).kv_outcome is KvOutcome.INCOMPATIBLE
        await engine.sim.reset_prefix_cache()
