"""The Attach stream over real gRPC: merging, flow control, heartbeats, breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest

from controlplane.errors import InvalidRequest
from controlplane.grpc_errors import from_rpc_error
from engines.base import FinishReason, TokenLogprob
from tests.scripted_engine import ScriptedEngine
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

from .conftest import Worker, until

ServeDecode = Callable[..., Awaitable[Worker]]


async def test_every_request_of_a_frontend_is_answered_over_one_stream(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1)
        await decode.submit("b", 2)
        for step in range(5):
            decode.engine.step({"a": [step], "b": [10 + step, 20 + step]})
            await asyncio.sleep(0)
        decode.engine.finish("a", token_ids=[99])
        decode.engine.finish("b", FinishReason.LENGTH)
        await until(lambda: len(frontend.finished) == 2)
    assert frontend.tokens == {1: [0, 1, 2, 3, 4, 99], 2: [10, 20, 11, 21, 12, 22, 13, 23, 14, 24]}
    assert frontend.finished[1].reason == common_pb2.FINISH_REASON_STOP
    assert frontend.finished[2].reason == common_pb2.FINISH_REASON_LENGTH
    assert decode.metric("tokenmill_decode_tokens_total") == 16


async def test_log_probabilities_travel_with_their_tokens(decode: Worker) -> None:
    async with decode.attached() as frontend:
        await decode.submit("a", 1, sampling={"logprobs": 1})
        decode.engine.step({"a": [5]}, {"a": [[TokenLogprob(5, -0.5), TokenLogprob(6, -1.5)]]})
        await until(lambda: frontend.batches)
    (entry,) = frontend.batches[0].logprobs
    assert entry.slot == 1
    assert [[(one.token_id, one.logprob) for one in position.tokens] for position in entry.positions] == [
        [(5, -0.5), (6, -1.5)]
    ]


async def test_tokens_of_several_steps_join_one_message(decode: Worker) -> None:
    async with decode.attached(min_flush_ms=20) as frontend:
        await decode.submit("a", 1)
        decode.engine.step({"a": [0]})
        await until(lambda: frontend.tokens)
        for step in range(1, 6):
            decode.engine.step({"a": [step]})
        await until(lambda: frontend.tokens[1] == [0, 1, 2, 3, 4, 5])
    assert len(frontend.batches) == 2


async def test_a_first_token_does_not_wait_for_company(decode: Worker) -> None:
    async with decode.attached(min_flush_ms=20) as frontend:
        waits = []
        for number in range(50):
            await decode.submit(f"r{number}", number)
            started = time.monotonic()
            decode.engine.step({f"r{number}": [1]})
            await until(lambda number=number: number in frontend.tokens)
            waits.append(time.monotonic() - started)
            decode.engine.finish(f"r{number}")
        assert min(waits) < 0.02, f"{waits} s, where none could be less than the wait for company"


async def test_an_idle_stream_sends_a_heartbeat_each_second(decode: Worker) -> None:
    started = time.monotonic()
    async with decode.attached() as frontend:
        await until(lambda: len(frontend.batches) == 2)
    assert time.monotonic() - started > 1.9
    assert all(not batch.slots and not batch.finished for batch in frontend.batches)
    assert frontend.batches[0].HasField("pulse"), "and says how the engine does"


async def test_a_frontend_that_stops_reading_fails_its_large_answers_alone(serve_decode: ServeDecode) -> None:
    decode = await serve_decode(max_unsent_bytes=200_000)
    stuck = decode.stub.Attach(decode_pb2.AttachRequest(attach_id="stuck"))
    await stuck.initial_metadata()
    await decode.submit("greedy", 1, attach_id="stuck")
    await decode.submit("modest", 2, attach_id="stuck")
    async with decode.attached("healthy") as healthy:
        await decode.submit("other", 1, attach_id="healthy")
        slowest = 0.0
        sent = 0
        async with asyncio.timeout(30):
            while "greedy" not in decode.engine.aborted:
                started = time.monotonic()
                decode.engine.step({"greedy": [30_000] * 5000, "other": [sent]})
                slowest = max(slowest, time.monotonic() - started)
                sent += 1
                await asyncio.sleep(0.001)
        decode.engine.step({"modest": [1, 2, 3]})
        decode.engine.finish("modest")
        await until(lambda: len(healthy.tokens[1]) == sent)
    assert healthy.tokens[1] == list(range(sent)), "another frontend's answer is whole"
    assert "modest" not in decode.engine.aborted

    # The frontend reads again: the stream is as good as ever, the large answer has failed, the small one is whole.
    frontend_tokens: list[int] = []
    finished: dict[int, decode_pb2.Finished] = {}
    async with asyncio.timeout(30):
        async for batch in stuck:
            if list(batch.slots) == [2]:
                frontend_tokens += batch.token_ids
            finished |= {one.slot: one for one in batch.finished}
            if len(finished) == 2:
                break
    stuck.cancel()
    assert finished[1].reason == common_pb2.FINISH_REASON_ERROR
    assert finished[1].error.code == "overloaded"
    assert frontend_tokens[-3:] == [1, 2, 3]
    assert finished[2].reason == common_pb2.FINISH_REASON_STOP


async def test_a_stream_that_nobody_reads_is_given_up_in_the_end(serve_decode: ServeDecode) -> None:
    decode = await serve_decode(stalled_write_s=0.3, max_unsent_bytes=100 << 20)
    stuck = decode.stub.Attach(decode_pb2.AttachRequest(attach_id="stuck"))
    await stuck.initial_metadata()
    await decode.submit("a", 1, attach_id="stuck")
    await decode.submit("b", 2, attach_id="stuck")
    async with asyncio.timeout(30):
        while "b" not in decode.engine.aborted:
            decode.engine.step({"a": [30_000] * 100_000})
            await asyncio.sleep(0.05)
    assert sorted(decode.engine.aborted) == ["a", "b"]


@pytest.mark.parametrize("hang", [False, True], ids=["engine answers", "engine hangs"])
async def test_a_broken_stream_cancels_its_requests(serve_decode: ServeDecode, hang: bool) -> None:
    decode = await serve_decode(ScriptedEngine(silent_aborts=hang))
    async with decode.attached("other") as other:
        await decode.submit("stays", 1, attach_id="other")
        async with decode.attached("breaks"):
            await decode.submit("a", 1, attach_id="breaks")
            await decode.submit("b", 2, attach_id="breaks")
        await until(lambda: sorted(decode.engine.aborted) == ["a", "b"], timeout_s=60)
        decode.engine.step({"stays": [4]})
        await until(lambda: other.tokens == {1: [4]})
    async with decode.attached("breaks"):
        pass  # the id is free again


async def test_a_second_stream_of_one_name_is_refused(decode: Worker) -> None:
    async with decode.attached("twice"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await decode.stub.Attach(decode_pb2.AttachRequest(attach_id="twice")).read()
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.param == "attach_id"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (decode_pb2.AttachRequest(attach_id=""), "attach_id"),
        (decode_pb2.AttachRequest(attach_id="x", min_flush_ms=21), "min_flush_ms"),
    ],
)
async def test_a_bad_attach_is_refused_by_field(decode: Worker, request_: decode_pb2.AttachRequest, param: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await decode.stub.Attach(request_).read()
    assert from_rpc_error(refused.value).param == param
