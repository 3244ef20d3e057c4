"""inference.v1 over plain gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from controlplane.errors import DeadlineExceeded, InvalidRequest, NotFound, Unsupported
from controlplane.grpc_errors import from_rpc_error
from tests.integration.frontend.peers import Frontend, Live, ScriptedDecode, ids, running_frontend, serving, until
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

TEXT = "naïve 👋🏽 日本"


@pytest.fixture
async def stub(frontend: Frontend) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def answer(live: Live) -> None:
    for token_id in ids(TEXT):
        live.send([token_id])
    live.finish(tokens=len(ids(TEXT)))


async def be_silent(live: Live) -> None:
    """Nothing comes."""


async def test_generate_streams_text_tokens_and_then_usage(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        request = inference_pb2.GenerateRequest(
            model=worker.model, prompt="hello", sampling=common_pb2.Sampling(max_tokens=99, temperature=0)
        )
        responses = [one async for one in stub.Generate(request, metadata=(("x-request-id", "mine"),))]
    assert "".join(one.text for one in responses) == TEXT
    assert [token_id for one in responses for token_id in one.token_ids] == ids(TEXT)
    assert {one.request_id for one in responses} == {"mine"}
    assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.completion_tokens == len(ids(TEXT))
    sampling = worker.requests[0].request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (99, 0, 1)


async def test_generate_takes_token_ids_and_tells_log_probabilities(frontend: Frontend, stub: Any) -> None:
    async def one_token(live: Live) -> None:
        (token_id,) = ids(" the")
        batch = decode_pb2.StepBatch(slots=[live.request.slot], counts=[1], token_ids=[token_id])
        token = decode_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)
        batch.logprobs.add(slot=live.request.slot).positions.add(tokens=[token])
        live.stream.outgoing.put_nowait(batch)
        live.finish(tokens=1)

    async with serving(frontend, ScriptedDecode(one_token)) as worker:
        request = inference_pb2.GenerateRequest(
            model=worker.model,
            prompt_token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
            sampling=common_pb2.Sampling(logprobs=0),
        )
        responses = [one async for one in stub.Generate(request)]
    assert list(worker.requests[0].request.prompt_token_ids) == [1, 2, 3]
    (token,) = responses[0].logprobs[0].tokens
    assert (token.text, token.logprob) == (" the", -0.5)


async def test_chat_uses_the_models_template_and_stop_strings(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        messages = [inference_pb2.Message(role="user", content="hello")]
        request = inference_pb2.ChatRequest(model=worker.model, messages=messages, stop=[" 👋"])
        responses = [one async for one in stub.Chat(request)]
        assert "".join(one.text for one in responses) == "naïve"
        assert list(worker.requests[0].request.prompt_token_ids) == ids(
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        )
        await until(lambda: worker.cancelled)


async def test_models_are_listed_with_their_workers(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    (model,) = [one for one in models if one.name == worker.model]
    assert (model.max_model_len, model.ready_workers) == (512, 1)


async def test_a_cancelled_call_cancels_the_worker_at_once(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(be_silent)) as worker:
        call = stub.Generate(inference_pb2.GenerateRequest(model=worker.model, prompt="x"))
        await until(lambda: worker.requests)
        call.cancel()
        gone_at = asyncio.get_running_loop().time()
        await until(lambda: worker.cancelled)
    (cancelled_at,) = worker.cancelled.values()
    assert cancelled_at - gone_at < 2, "200 ms are promised, on a machine that has time"


async def test_the_calls_deadline_is_the_requests(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(be_silent)) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(model=worker.model, prompt="x"), timeout=0.3):
                pass
        assert isinstance(from_rpc_error(failed.value), DeadlineExceeded)
        assert 0 < worker.requests[0].request.timeout_ms <= 300
        await until(lambda: worker.cancelled)


async def test_a_client_that_stops_reading_is_let_go_when_its_time_is_over(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    async def say_much(live: Live) -> None:
        """More than the connection's buffers take, about 4 MB, and less than a frontend keeps."""
        position = decode_pb2.PositionLogprobs(tokens=[decode_pb2.TokenLogprob(token_id=7, logprob=-1)] * 20)
        for _ in range(60):
            batch = decode_pb2.StepBatch(slots=[live.request.slot], counts=[1000], token_ids=ids(" the") * 1000)
            batch.logprobs.add(slot=live.request.slot, positions=[position] * 1000)
            live.stream.outgoing.put_nowait(batch)
            await asyncio.sleep(0.05)

    with running_frontend(etcd, nats, tmp_path / "log", "--request-timeout-s", "4") as frontend:
        async with (
            serving(frontend, ScriptedDecode(say_much)) as worker,
            grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel,
            httpx.AsyncClient(base_url=frontend.url, timeout=60) as http,
        ):
            request = inference_pb2.GenerateRequest(model=worker.model, prompt="hello")
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            counted = 'tokenmill_requests_total{endpoint="inference.v1/Generate",status="DEADLINE_EXCEEDED"} 1.0'
            async with asyncio.timeout(60):
                while counted not in (await http.get("/metrics")).text:  # noqa: ASYNC110  another process counts
                    await asyncio.sleep(0.05)
            call.cancel()


@pytest.mark.parametrize(
    ("request_fields", "kind", "param"),
    [
        ({"model": "nobody's", "prompt": "x"}, NotFound, "model"),
        ({}, InvalidRequest, "prompt"),
        ({"prompt": "x", "sampling": common_pb2.Sampling(temperature=3)}, InvalidRequest, "sampling.temperature"),
        ({"prompt": "x", "sampling": common_pb2.Sampling(max_tokens=0)}, InvalidRequest, "sampling.max_tokens"),
        ({"prompt": "x", "sampling": common_pb2.Sampling(seed=1)}, Unsupported, "seed"),
        ({"prompt": "x", "stop": ["a"] * 17}, InvalidRequest, "stop"),
        ({"prompt": "x" * 600}, InvalidRequest, "prompt"),
    ],
)
async def test_a_wrong_request_is_refused_with_details(
    frontend: Frontend, stub: Any, request_fields: dict[str, Any], kind: type[Exception], param: str
) -> None:
    async with serving(frontend, ScriptedDecode(answer), capabilities=()) as worker:
        request = inference_pb2.GenerateRequest(**{"model": worker.model} | request_fields)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in stub.Generate(request):
                pass
    error = from_rpc_error(failed.value)
    assert type(error) is kind
    assert error.param == param
    assert worker.requests == []


async def test_a_chat_without_messages_or_with_a_strange_role_is_refused(frontend: Frontend, stub: Any) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        for messages in ([], [inference_pb2.Message(role="king", content="x")]):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in stub.Chat(inference_pb2.ChatRequest(model=worker.model, messages=messages)):
                    pass
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
