from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence

import psutil
import pytest

from controlplane.errors import EngineFailed, InvalidRequest, SettingsError
from engines.base import Capability, EngineRequest, FinishReason, Role, SamplingParams, StepOutput
from engines.sim.config import SimConfig
from engines.sim.engine import SimEngine
from engines.sim.profile import profile
from engines.sim.tokens import TokenSource, builtin_vocabulary
from kvcache.events import Cleared, Removed, Stored
from kvcache.hashing import hash_blocks, root_hash
from tests.integration.engines.sim.running import HASH_SEED, Engine, until


def expected(prompt: list[int], count: int) -> list[int]:
    source = TokenSource(builtin_vocabulary(), array("I", prompt), 0, 0)
    return [source.next(True) for _ in range(count)]


async def test_an_answer_comes_token_by_token_and_ends_with_its_usage(engine: Engine) -> None:
    tokens, last = await engine.answer("a", list(range(40)), max_tokens=20)
    assert tokens == expected(list(range(40)), 20)
    assert last.finish is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (40, 20, 0)


async def test_many_at_once_say_what_each_would_say_alone_and_share_calls() -> None:
    async with Engine(total_blocks=128, max_num_seqs=16, max_batched_tokens=64) as engine:
        prompts = [[n] * (10 + 3 * n) for n in range(40)]
        ends = [await engine.submit(f"r{n}", prompt, max_tokens=50) for n, prompt in enumerate(prompts)]
        async with asyncio.timeout(30):
            answers = [await end for end in ends]
        for prompt, outputs in zip(prompts, answers, strict=True):
            assert [token for output in outputs for token in output.token_ids] == expected(prompt, 50)
        assert engine.calls < 40 * 50 / 4
        engine.sim._scheduler.check_integrity()


async def test_an_answer_without_max_tokens_ends_by_itself_with_the_end_token(engine: Engine) -> None:
    lengths = []
    for n in range(20):
        tokens, last = await engine.answer(str(n), [n], max_tokens=None)
        assert last.finish is FinishReason.STOP
        assert [token for token in tokens if token in engine.info.eos_token_ids] == tokens[-1:]
        lengths.append(len(tokens))
    assert 100 < sum(lengths) / 20 < 400
    tokens, last = await engine.answer("on", [0], max_tokens=None, ignore_eos=True)
    assert last.finish is FinishReason.LENGTH
    assert len(tokens) == engine.info.max_model_len - 1


async def test_an_answer_goes_on_in_another_engine_where_it_broke_off(engine: Engine) -> None:
    prompt = list(range(30))
    whole, _ = await engine.answer("a", prompt, max_tokens=30)
    async with Engine() as other:
        rest, _ = await other.answer("a", prompt + whole[:13], max_tokens=17)
    assert rest == whole[13:]


async def test_events_carry_the_hashes_that_everyone_computes(engine: Engine) -> None:
    prompt = list(range(40))
    tokens, _ = await engine.answer("a", prompt, max_tokens=10)
    root = root_hash(engine.info.format.model_fingerprint, seed=HASH_SEED)
    stored = [block_hash for event in engine.events if isinstance(event, Stored) for block_hash in event.hashes]
    assert stored == hash_blocks(array("I", prompt + tokens[:9]), 16, root, HASH_SEED)
    assert not [event for event in engine.events if isinstance(event, Removed)]
    assert await engine.sim.reset_prefix_cache()
    assert engine.events[-1] == Cleared()


async def test_a_repeated_prompt_is_found_in_the_cache(engine: Engine) -> None:
    await engine.answer("a", list(range(100)))
    _, last = await engine.answer("b", list(range(100)))
    assert last.usage is not None
    assert last.usage.cached_tokens == 96


async def test_abort_ends_a_running_and_a_waiting_request_and_frees_their_blocks() -> None:
    async with Engine(time_scale=1, max_num_seqs=1) as engine:
        running = await engine.submit("running", list(range(50)), max_tokens=1000)
        waiting = await engine.submit("waiting", list(range(50)), max_tokens=1000)
        await until(lambda: engine.calls > 2)
        for name, end in (("running", running), ("waiting", waiting)):
            assert engine.sim.abort(name)
            last = (await end)[-1]
            assert last.finish is FinishReason.CANCELLED
            emitted = sum(len(output.token_ids) for output in await end)
            assert last.usage is not None
            assert last.usage.completion_tokens == emitted
        assert not engine.sim.abort("running")
        assert engine.sim.load().kv_used_blocks == 0


async def test_a_cancelled_prefill_holds_nothing() -> None:
    async with Engine(time_scale=0.01) as engine:
        request = EngineRequest("p", list(range(500)), SamplingParams())
        call = asyncio.create_task(engine.sim.prefill(request))
        await until(lambda: engine.sim.load().running_requests == 1 or engine.sim.load().kv_used_blocks > 0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.sim.load().kv_used_blocks == 0


async def test_held_kv_is_freed_by_release_and_by_the_leases_end() -> None:
    async with Engine(lease_s=0.3) as engine:
        first = await engine.sim.prefill(EngineRequest("a", list(range(40)), SamplingParams()))
        assert first.tokens == 32
        assert engine.sim.load().kv_leased_blocks == 2
        assert await engine.sim.release(first.handle_id)
        assert not await engine.sim.release(first.handle_id)
        second = await engine.sim.prefill(EngineRequest("b", list(range(40)), SamplingParams()))
        assert second.cached_tokens == 32
        await until(lambda: engine.sim.load().kv_leases == 0)
        assert engine.sim.load().kv_leases_expired == 1
        assert engine.sim.load().kv_used_blocks == 0


@pytest.mark.parametrize("prompt", [[], [1] * 2048])
async def test_a_prompt_that_leaves_no_room_is_refused(engine: Engine, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        await engine.submit("a", prompt)


async def test_a_request_id_in_use_is_refused() -> None:
    async with Engine(time_scale=1) as engine:
        await engine.submit("a", [1], max_tokens=1000)
        with pytest.raises(InvalidRequest, match="request_id"):
            await engine.sim.generate(EngineRequest("a", [1], SamplingParams()), engine.sink)


async def test_steps_take_the_profiles_time_divided_by_the_time_scale() -> None:
    async with Engine(time_scale=2) as engine:
        start = time.monotonic()
        await engine.answer("a", [1, 2, 3], max_tokens=60)
        took = time.monotonic() - start
    assert took >= 60 * profile("h100-8b").step_us / 1e6 / 2 - 0.06, "at most what it may catch up is missing"


async def test_the_event_loop_goes_on_at_full_speed(engine: Engine) -> None:
    end = await engine.submit("a", [1], max_tokens=2000)
    turns = 0
    while not end.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1000


async def test_without_bytes_it_serves_and_says_that_it_moves_no_kv() -> None:
    async with Engine(kv_bytes_per_block=0) as engine:
        assert not {Capability.HOLD_KV, Capability.REMOTE_PREFILL} & engine.info.capabilities
        assert (await engine.answer("a", [1, 2, 3]))[0] == expected([1, 2, 3], 8)


async def test_an_address_of_another_machine_is_a_setting_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    engine = SimEngine(SimConfig(), Role.DECODE, "x", 0, "203.0.113.9")
    with pytest.raises(SettingsError, match=r"203\.0\.113\.9"):
        await engine.start(lambda _: None, lambda _: None)
    await engine.stop()


async def test_stopping_ends_all_requests_and_can_be_repeated() -> None:
    async with Engine(time_scale=1) as engine:
        end = await engine.submit("a", [1], max_tokens=1000)
        await engine.sim.stop()
        assert (await end)[-1].finish is FinishReason.CANCELLED
        await engine.sim.stop()


async def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
    engine = SimEngine(SimConfig(), Role.DECODE, "x", 0)
    with pytest.raises(SettingsError, match="nixl"):
        await engine.start(lambda _: None, lambda _: None)
    await engine.stop()


async def test_an_engine_that_breaks_ends_all_requests_with_an_error_and_says_why() -> None:
    async with Engine(time_scale=1) as engine:

        def broken(outputs: Sequence[StepOutput]) -> None:
            if outputs[-1].finish is None:
                raise ZeroDivisionError("a sink must not raise")

        end = await engine.submit("a", [1], max_tokens=1000)
        prefill = asyncio.create_task(engine.sim.prefill(EngineRequest("p", [2] * 2000, SamplingParams())))
        await engine.sim.generate(EngineRequest("b", [1], SamplingParams()), broken)
        last = (await end)[-1]
        assert last.finish is FinishReason.ERROR
        assert last.failure is not None
        assert "ZeroDivisionError" in last.failure.message
        assert "ZeroDivisionError" in (engine.sim.failed() or "")
        with pytest.raises(EngineFailed):
            await engine.submit("c", [1])
        with pytest.raises(EngineFailed):
            await prefill


async def test_an_idle_engine_costs_no_cpu(engine: Engine) -> None:
    await engine.answer("a", [1, 2, 3])
    before = sum(psutil.Process().cpu_times()[:2])
    await asyncio.sleep(2)  # idleness has no event to wait for
    assert (sum(psutil.Process().cpu_times()[:2]) - before) / 2 < 0.2, "waiting in a loop would be all of one core"
