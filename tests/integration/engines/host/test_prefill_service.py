"""Run and Release over real gRPC: nothing stays held for a caller who has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from controlplane.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from controlplane.grpc_errors import from_rpc_error
from tests.scripted_engine import FORMAT, INFO
from tokenmill.prefill.v1 import prefill_pb2

from .conftest import EPOCH, Worker, until


def run(prefill: Worker, request_id: str = "r1", timeout: float = 5, **fields: Any) -> Any:
    """A Run call that is good but for what the test says."""
    fields = {"model": "scripted", "prompt_token_ids": [1, 2, 3]} | fields
    return prefill.stub.Run(prefill_pb2.RunRequest(request_id=request_id, **fields), timeout=timeout)


def runs(prefill: Worker, result: str) -> float:
    return prefill.metric("tokenmill_prefill_runs_total", result=result)


async def refusal(call: Awaitable[Any]) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


async def test_a_prompt_is_computed_and_its_kv_held_under_a_handle(prefill: Worker) -> None:
    response = await run(prefill)
    handle = response.handle
    assert (handle.handle_id, handle.instance_id, handle.epoch) == ("handle-r1", "worker-1", EPOCH)
    assert handle.address == prefill.address
    assert handle.lease_ms == handle.remaining_lease_ms == 120_000
    assert (handle.tokens, handle.engine_params, list(handle.digests)) == (3, b"where", [b"digest"])
    assert handle.format.block_size == FORMAT.block_size
    assert prefill.engine.held == {"handle-r1"}
    assert runs(prefill, "ok") == 1


async def test_a_handle_is_released_once(prefill: Worker) -> None:
    handle = (await run(prefill)).handle
    request = prefill_pb2.ReleaseRequest(handle_id=handle.handle_id, epoch=handle.epoch)
    assert (await prefill.stub.Release(request)).released
    assert not prefill.engine.held
    assert not (await prefill.stub.Release(request)).released


async def test_a_handle_that_its_caller_did_not_wait_for_is_released_by_its_request(prefill: Worker) -> None:
    epoch = (await run(prefill)).handle.epoch
    request = prefill_pb2.ReleaseRequest(request_id="r1", epoch=epoch)
    assert (await prefill.stub.Release(request)).released
    assert not prefill.engine.held
    assert not (await prefill.stub.Release(request)).released


async def test_a_handle_of_another_epoch_is_not_this_workers(prefill: Worker) -> None:
    handle = (await run(prefill)).handle
    request = prefill_pb2.ReleaseRequest(handle_id=handle.handle_id, epoch=handle.epoch - 1)
    assert not (await prefill.stub.Release(request)).released
    assert prefill.engine.held


async def test_cancelling_run_stops_the_work_and_holds_nothing(prefill: Worker) -> None:
    prefill.engine.prefills_may_end.clear()
    call = run(prefill)
    await until(lambda: prefill.engine.prefilling)
    call.cancel()
    await until(lambda: runs(prefill, "cancelled") == 1, timeout_s=60)
    prefill.engine.prefills_may_end.set()
    await asyncio.sleep(0.05)
    assert not prefill.engine.held


async def test_the_deadline_of_the_call_is_the_deadline_of_the_work(prefill: Worker) -> None:
    prefill.engine.prefills_may_end.clear()
    assert isinstance(await refusal(run(prefill, timeout=1)), DeadlineExceeded)
    await until(lambda: runs(prefill, "deadline_exceeded") + runs(prefill, "cancelled") == 1, timeout_s=60)
    prefill.engine.prefills_may_end.set()
    await asyncio.sleep(0.05)
    assert not prefill.engine.held


@pytest.mark.parametrize("delay_s", [i / 10_000 for i in range(0, 40, 4)])
async def test_a_call_cancelled_while_it_ends_holds_nothing_or_was_answered(prefill: Worker, delay_s: float) -> None:
    prefill.engine.prefills_may_end.clear()
    call = run(prefill)
    await until(lambda: prefill.engine.prefilling)
    prefill.engine.prefills_may_end.set()
    await asyncio.sleep(delay_s)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: runs(prefill, "cancelled") + runs(prefill, "ok") == 1, timeout_s=60)
    if runs(prefill, "cancelled"):
        await until(lambda: not prefill.engine.held, timeout_s=60)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"request_id": ""}, InvalidRequest, "request_id"),
        ({"model": "other"}, NotFound, "model"),
        ({"prompt_token_ids": []}, InvalidRequest, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * INFO.max_model_len}, InvalidRequest, "prompt_token_ids"),
        ({"sampling": {"top_p": 0}}, InvalidRequest, "sampling.top_p"),
    ],
)
async def test_a_bad_prompt_is_refused(prefill: Worker, fields: dict[str, Any], kind: type, param: str) -> None:
    error = await refusal(run(prefill, **fields))
    assert type(error) is kind
    assert error.param == param
    assert not prefill.engine.held


async def test_an_engines_error_reaches_the_caller_and_is_counted(prefill: Worker) -> None:
    prefill.engine.refusal = EngineFailed("the engine broke")
    assert isinstance(await refusal(run(prefill)), EngineFailed)
    assert runs(prefill, "engine_failed") == 1


async def test_more_prompts_than_the_bound_are_told_to_come_back(prefill: Worker) -> None:
    prefill.engine.prefills_may_end.clear()
    calls = [run(prefill, f"r{number}") for number in range(INFO.max_num_seqs + 2)]
    await until(lambda: len(prefill.engine.prefilling) == INFO.max_num_seqs + 2)
    error = await refusal(run(prefill, "one more"))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    assert (await refusal(run(prefill, "r0"))).param == "request_id"
    prefill.engine.prefills_may_end.set()
    assert len(await asyncio.gather(*calls)) == INFO.max_num_seqs + 2


async def test_draining_waits_for_prompts_and_for_held_kv(prefill: Worker) -> None:
    prefill.engine.prefills_may_end.clear()
    call = run(prefill)
    await until(lambda: prefill.engine.prefilling)
    draining = asyncio.create_task(prefill.service.drain(timeout_s=60))
    await asyncio.sleep(0.05)
    assert isinstance(await refusal(run(prefill, "new")), Unavailable)
    prefill.engine.prefills_may_end.set()
    handle = (await call).handle
    await asyncio.sleep(0.15)
    assert not draining.done(), "its KV has not been read"
    await prefill.stub.Release(prefill_pb2.ReleaseRequest(handle_id=handle.handle_id, epoch=handle.epoch))
    await asyncio.wait_for(draining, 60)


async def test_a_drain_taken_back_lets_new_prompts_in_again(prefill: Worker) -> None:
    held = (await run(prefill)).handle
    draining = asyncio.create_task(prefill.service.drain(timeout_s=60))
    await asyncio.sleep(0.05)
    assert isinstance(await refusal(run(prefill, "new")), Draining)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    prefill.service.resume()
    assert (await run(prefill, "newer")).handle.handle_id != held.handle_id


async def test_a_prompt_that_outlasts_the_drain_fails(prefill: Worker) -> None:
    prefill.engine.prefills_may_end.clear()
    call = run(prefill)
    await until(lambda: prefill.engine.prefilling)
    await asyncio.wait_for(prefill.service.drain(timeout_s=0.1), 60)
    assert isinstance(await refusal(call), Unavailable)
    assert not prefill.engine.held
