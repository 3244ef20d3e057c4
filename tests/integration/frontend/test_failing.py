"""A frontend that fails while it has answers in the making."""

from __future__ import annotations

from pathlib import Path

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.errors import Unavailable
from controlplane.grpc_errors import from_rpc_error
from tests.integration.frontend.peers import Live, ScriptedDecode, running_frontend, serving, until
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc


async def say_nothing(_: Live) -> None:
    """For as long as it is asked."""


async def test_who_waits_for_an_answer_of_a_frontend_that_fails_is_told_to_try_again(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with running_frontend(etcd, nats, log) as frontend:
        namesake = await Discovery.connect(etcd, frontend.deployment, CollectorRegistry(), timeout_s=60)
        worker, other = ScriptedDecode(say_nothing), ScriptedDecode(say_nothing)
        other.model = worker.model
        async with (
            serving(frontend, worker),
            serving(frontend, other),
            grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel,
        ):
            request = inference_pb2.GenerateRequest(
                model=worker.model, prompt="Hello", sampling=common_pb2.Sampling(max_tokens=8)
            )
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
            await until(lambda: worker.requests or other.requests)
            (instance,) = namesake.by_service("frontend")
            await namesake.register(msgspec.structs.replace(instance, epoch=instance.epoch + 1))
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await call.read()
        error = from_rpc_error(told.value)
        assert isinstance(error, Unavailable), error
        assert error.retry_after_s > 0
        await until(lambda: frontend.process.poll() is not None)
        await namesake.close()
    assert "goes by the id" in log.read_text()
    assert "call failed unexpectedly" not in log.read_text()
