"""Submit, Cancel and Generate over real gRPC: refusals, ends of every kind, KV handles, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from controlplane.channels import Channels
from controlplane.errors import (
    Draining,
    InvalidRequest,
    NotFound,
    Overloaded,
    Stalled,
    TokenmillError,
    Unavailable,
    Unsupported,
)
from controlplane.grpc_errors import ErrorInterceptor, from_rpc_error
from engines.base import Capability, FinishReason, KvOutcome, PrefillResult, Usage
from engines.host.convert import handle_to_proto
from engines.host.decode_service import DecodeService
from engines.host.live import DecodeLimits
from tests.scripted_engine import FORMAT, INFO, ScriptedEngine
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc

from .conftest import Worker, until

ServeDecode = Callable[..., Awaitable[Worker]]


async def refusal(call: Awaitable[Any]) -> TokenmillError:
    """The error that a call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


def a_handle(remaining_lease_ms: int = 120_000, **other_format: Any) -> common_pb2.KvHandle:
    """A handle with a lease of 120 s, which fits the scripted engine unless told otherwise."""
    result = PrefillResult("h1", 3, 0, b"where", (b"digest",), lease_s=120.0)
    kv_format = replace(FORMAT, **other_format)
    handle = handle_to_proto(result, kv_format, instance_id="prefill-1", epoch=3, address="127.0.0.1:9")
    handle.remaining_lease_ms = remaining_lease_ms
    return handle


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"attach_id": "nobody"}, Unavailable, "attach_id"),
        ({"request_id": ""}, InvalidRequest, "request_id"),
        ({"model": "other"}, NotFound, "model"),
        ({"prompt_token_ids": []}, InvalidRequest, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * INFO.max_model_len}, InvalidRequest, "prompt_token_ids"),
        ({"prompt_token_ids": [INFO.vocab_size]}, InvalidRequest, "prompt_token_ids"),
        ({"sampling": {"temperature": 3}}, InvalidRequest, "sampling.temperature"),
    ],
)
async def test_a_bad_request_is_refused_before_the_engine_hears_of_it(
    decode: Worker, fields: dict[str, Any], kind: type[TokenmillError], param: str
) -> None:
    async with decode.attached():
        error = await refusal(decode.submit(**fields))
        assert type(error) is kind
        assert error.param == param
        assert not decode.engine.requests
        await decode.submit("r1", 0)  # nothing of it remains


async def test_what_the_engine_lacks_is_refused(serve_decode: ServeDecode) -> None:
    decode = await serve_decode(ScriptedEngine().lacking(Capability.SEED))
    async with decode.attached():
        error = await refusal(decode.submit(sampling={"seed": 1}))
    assert isinstance(error, Unsupported)
    assert error.param == "sampling.seed"


async def test_a_live_slot_and_a_live_request_id_are_taken(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        assert (await refusal(decode.submit("b", 1))).param == "slot"
        assert (await refusal(decode.submit("a", 2))).param == "request_id"
        decode.engine.step({"a": [7]})
        decode.engine.finish("a")
        await until(lambda: 1 in frontend.finished)
        await decode.submit("a", 1)
    assert frontend.tokens == {1: [7]}


async def test_more_requests_than_the_bound_are_told_to_come_back(serve_decode: ServeDecode) -> None:
    decode = await serve_decode(max_waiting=1)
    async with decode.attached():
        for number in range(INFO.max_num_seqs + 1):
            await decode.submit(f"r{number}", number)
        error = await refusal(decode.submit("one more", 99))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        decode.engine.finish("r0")
        await decode.submit("one more", 99)


async def test_a_refusal_by_the_engine_leaves_nothing(decode: Worker) -> None:
    async with decode.attached():
        decode.engine.refusal = Overloaded("no room", retry_after_s=2.0)
        error = await refusal(decode.submit("a", 1))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 2.0
        decode.engine.refusal = None
        await decode.submit("a", 1)


@pytest.mark.parametrize("hang", [False, True], ids=["engine answers", "engine hangs"])
@pytest.mark.parametrize("started", [False, True], ids=["before the first token", "after it"])
async def test_a_cancelled_request_ends_at_once(serve_decode: ServeDecode, hang: bool, started: bool) -> None:
    decode = await serve_decode(ScriptedEngine(silent_aborts=hang))
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        if started:
            decode.engine.step({"a": [1, 2]})
        at = time.monotonic()
        response = await decode.stub.Cancel(decode_pb2.CancelRequest(request_ids=["a", "unknown"]))
        assert response.cancelled == 1
        await until(lambda: 1 in frontend.finished)
        assert time.monotonic() - at < 2, "200 ms are promised"
        assert decode.engine.aborted == ["a"]
        if hang:
            decode.engine.step({"a": [3]})  # too late to be passed on
            await asyncio.sleep(0.05)
    assert frontend.finished[1].reason == common_pb2.FINISH_REASON_CANCELLED
    assert frontend.finished[1].usage.completion_tokens == (2 if started else 0)
    assert frontend.tokens.get(1, []) == ([1, 2] if started else [])


async def test_a_cancel_that_comes_while_the_engine_admits_is_not_lost(decode: Worker) -> None:
    async with decode.attached() as frontend:
        decode.engine.admissions_may_end.clear()
        submitting = asyncio.create_task(decode.submit("a", 1))
        await until(lambda: decode.engine.admitting == ["a"])
        assert (await decode.stub.Cancel(decode_pb2.CancelRequest(request_ids=["a"]))).cancelled == 1
        await until(lambda: 1 in frontend.finished)
        decode.engine.admissions_may_end.set()
        await submitting
        await until(lambda: decode.engine.aborted == ["a"])
        await decode.submit("a", 1)


async def test_a_submit_whose_caller_leaves_holds_nothing(decode: Worker) -> None:
    async with decode.attached():
        decode.engine.admissions_may_end.clear()
        submitting = asyncio.create_task(decode.submit("a", 1))
        await until(lambda: decode.engine.admitting == ["a"])
        submitting.cancel()
        await until(lambda: not decode.engine.admitting)
        decode.engine.admissions_may_end.set()
        await decode.submit("a", 1)


async def test_a_request_that_outlives_its_time_fails_and_is_aborted(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1, timeout_ms=150)
        decode.engine.step({"a": [1]})
        await until(lambda: 1 in frontend.finished, timeout_s=60)
    assert frontend.finished[1].reason == common_pb2.FINISH_REASON_ERROR
    assert frontend.finished[1].error.code == "deadline_exceeded"
    assert decode.engine.aborted == ["a"]


async def test_a_young_handle_goes_to_the_engine_and_its_outcome_to_the_frontend(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1, kv=a_handle(remaining_lease_ms=111_000))
        handle = decode.engine.requests["a"][0].kv
        assert handle is not None
        assert (handle.handle_id, handle.lease_s) == ("h1", 111.0)
        decode.engine.finish("a", usage=Usage(3, 0, remote_tokens=3), kv_outcome=KvOutcome.READ)
        await until(lambda: 1 in frontend.finished)
    assert frontend.finished[1].kv_outcome == decode_pb2.KV_OUTCOME_READ
    assert frontend.finished[1].usage.remote_tokens == 3
    assert not decode.released
    assert decode.metric("tokenmill_kv_handoffs_total", outcome="read") == 1


@pytest.mark.parametrize(
    ("handle", "outcome"),
    [
        (a_handle(remaining_lease_ms=109_000), KvOutcome.TOO_OLD),
        (a_handle(remaining_lease_ms=0), KvOutcome.TOO_OLD),
        (a_handle(block_size=32), KvOutcome.INCOMPATIBLE),
        (a_handle(model_fingerprint="other"), KvOutcome.INCOMPATIBLE),
    ],
)
async def test_a_handle_not_worth_trying_is_released_and_the_prompt_computed_here(
    decode: Worker, handle: common_pb2.KvHandle, outcome: KvOutcome
) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1, kv=handle)
        assert decode.engine.requests["a"][0].kv is None
        assert [one.handle_id for one in decode.released] == ["h1"]
        decode.engine.finish("a")
        await until(lambda: 1 in frontend.finished)
    assert frontend.finished[1].kv_outcome == outcome.value
    assert decode.metric("tokenmill_kv_handoffs_total", outcome=outcome.name.lower()) == 1


async def test_the_kv_of_a_request_cancelled_before_it_was_read_is_released(decode: Worker) -> None:
    async with decode.attached():
        await decode.submit("a", 1, kv=a_handle())
        await decode.stub.Cancel(decode_pb2.CancelRequest(request_ids=["a"]))
        await until(lambda: [one.handle_id for one in decode.released] == ["h1"])


@pytest.mark.parametrize("outcome", [KvOutcome.UNREACHABLE, KvOutcome.INCOMPATIBLE, KvOutcome.LATE])
async def test_kv_that_the_engine_did_not_read_is_released(decode: Worker, outcome: KvOutcome) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1, kv=a_handle())
        decode.engine.finish("a", kv_outcome=outcome)
        await until(lambda: 1 in frontend.finished)
        assert [one.handle_id for one in decode.released] == ["h1"]


async def test_generate_streams_one_request_by_itself(decode: Worker) -> None:
    request = decode_pb2.GenerateRequest(request_id="g", model="scripted", prompt_token_ids=[1, 2])
    call = decode.stub.Generate(request, timeout=60)
    await until(lambda: "g" in decode.engine.requests)
    decode.engine.step({"g": [4]})
    decode.engine.finish("g", FinishReason.LENGTH, token_ids=[5], usage=Usage(2, 2))
    responses = [response async for response in call]
    assert [token for response in responses for token in response.token_ids] == [4, 5]
    assert [response.HasField("finished") for response in responses][-1:] == [True]
    assert responses[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert responses[-1].finished.usage.completion_tokens == 2


async def test_generate_is_refused_like_submit(decode: Worker) -> None:
    error = await refusal(decode.stub.Generate(decode_pb2.GenerateRequest(request_id="g", model="other")).read())
    assert isinstance(error, NotFound)


async def test_cancelling_generate_aborts_the_request(decode: Worker) -> None:
    request = decode_pb2.GenerateRequest(request_id="g", model="scripted", prompt_token_ids=[1, 2])
    call = decode.stub.Generate(request)
    await until(lambda: "g" in decode.engine.requests)
    call.cancel()
    await until(lambda: decode.engine.aborted == ["g"], timeout_s=60)


async def test_a_draining_worker_finishes_what_runs_and_refuses_the_new(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        draining = asyncio.create_task(decode.service.drain(timeout_s=60))
        await asyncio.sleep(0.05)
        assert isinstance(await refusal(decode.submit("b", 2)), Unavailable)
        decode.engine.step({"a": [1]})
        assert not draining.done()
        decode.engine.finish("a")
        await asyncio.wait_for(draining, 60)
        decode.service.close()
        await until(lambda: 1 in frontend.finished)
    assert frontend.tokens == {1: [1]}
    assert frontend.finished[1].reason == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("hang", [False, True], ids=["engine answers", "engine hangs"])
async def test_a_request_that_outlasts_the_drain_fails(serve_decode: ServeDecode, hang: bool) -> None:
    decode = await serve_decode(ScriptedEngine(silent_aborts=hang))
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        await asyncio.wait_for(decode.service.drain(timeout_s=0.1), 1)
        decode.service.close()
        await until(lambda: 1 in frontend.finished)
    assert frontend.finished[1].error.code == "draining"
    assert decode.engine.aborted == ["a"]


async def test_a_drain_taken_back_lets_new_requests_in_again(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        draining = asyncio.create_task(decode.service.drain(timeout_s=60))
        await asyncio.sleep(0.05)
        assert isinstance(await refusal(decode.submit("b", 2)), Draining)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        decode.service.resume()
        await decode.submit("c", 3)
        decode.engine.finish("a")
        decode.engine.finish("c")
        await until(lambda: {1, 3} <= frontend.finished.keys())


async def test_a_worker_that_still_loads_refuses_every_call() -> None:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    DecodeService(DecodeLimits()).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = Channels()
    stub = decode_pb2_grpc.DecodeStub(channels.get(f"127.0.0.1:{port}"))
    for call in (
        stub.Submit(decode_pb2.SubmitRequest()),
        stub.Cancel(decode_pb2.CancelRequest()),
        stub.Attach(decode_pb2.AttachRequest()).read(),
        stub.Generate(decode_pb2.GenerateRequest()).read(),
    ):
        assert isinstance(await refusal(call), Unavailable)
    await channels.close()
    await server.stop(0)


async def test_a_halted_worker_fails_what_it_has_without_its_engine_and_takes_requests_again_when_told(
    serve_decode: Callable[..., Awaitable[Worker]],
) -> None:
    decode = await serve_decode(ScriptedEngine(silent_aborts=True))
    async with decode.attached() as frontend:
        await decode.submit("r1", 1)
        assert decode.service.busy == 1
        decode.service.halt("it hangs")
        await until(lambda: 1 in frontend.finished)
        assert (frontend.finished[1].error.code, frontend.finished[1].error.message) == ("stalled", "it hangs")
        assert decode.service.busy == 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await decode.submit("r2", 2)
        assert isinstance(from_rpc_error(refused.value), Stalled)
        decode.service.go_on()
        await decode.submit("r3", 3)
        decode.engine.step({"r1": [1], "r3": [2]})
        await until(lambda: frontend.tokens.get(3) == [2])
        assert 1 not in frontend.tokens, "it has ended, whatever its engine still makes of it"
