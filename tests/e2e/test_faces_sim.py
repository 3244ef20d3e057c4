"""What a running suite shows of itself: to gRPC tools, to OpenAI's client, and to the network."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import OpenAI

from tests.e2e.command_line import Tokenmill
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

_BY_ALL = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "tokenmill.control.v1.Control"}
_SERVED = {
    "frontend": {"tokenmill.inference.v1.Inference"},
    "router": {"tokenmill.router.v1.Router"},
    "prefill": {"tokenmill.prefill.v1.Prefill", "tokenmill.kv.v1.KvSource"},
    "decode": {"tokenmill.decode.v1.Decode", "tokenmill.kv.v1.KvSource"},
}


@dataclass
class Suite:
    url: str
    instances: dict[str, dict[str, Any]]
    """By service."""
    tokenmill: Tokenmill


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = tmp_path_factory.mktemp("faces") / "tmp"
    folder.mkdir()
    tokenmill = Tokenmill(folder)
    started = tokenmill.run("up", "-d", "--engine", "sim", "--time-scale", "20", "--port", "0")
    assert started.returncode == 0, started.stderr
    instances = json.loads(tokenmill.run("status", "--json").stdout)["instances"]
    yield Suite(started.stdout.strip(), {one["service"]: one for one in instances}, tokenmill)
    assert tokenmill.run("down").returncode == 0
    tokenmill.assert_nothing_left()


@pytest.mark.parametrize("service", _SERVED)
async def test_reflection_lists_what_a_service_serves(suite: Suite, service: str) -> None:
    async with grpc.aio.insecure_channel(suite.instances[service]["address"]) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([ask]), timeout=30):
            names = {listed.name for listed in answer.list_services_response.service}
    assert names == _SERVED[service] | _BY_ALL


async def test_a_plain_grpc_client_streams_an_answer_that_remote_prefill_began(suite: Suite) -> None:
    async with grpc.aio.insecure_channel(suite.instances["frontend"]["address"]) as channel:
        request = inference_pb2.GenerateRequest(
            prompt="Once upon a time there was a mill. " * 4,
            sampling=common_pb2.Sampling(max_tokens=20, ignore_eos=True),
        )
        parts = [part async for part in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)]
    assert sum(len(part.token_ids) for part in parts) == 20
    assert "".join(part.text for part in parts)
    assert parts[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (parts[-1].usage.completion_tokens, parts[-1].usage.remote_tokens > 0) == (20, True)


def test_the_official_client_gets_the_same_answer_streamed_and_not(suite: Suite) -> None:
    client = OpenAI(base_url=f"{suite.url}/v1", api_key="any", timeout=60)
    (model,) = [one.id for one in client.models.list()]
    question: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "Grüße aus der Mühle 🌾"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**question)
    streamed = "".join(
        event.choices[0].delta.content or "" for event in client.chat.completions.create(stream=True, **question)
    )
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "no-such-model"}, 404, "model"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "long " * 500_000}, 400, "prompt"),
        ({"prompt": {"not": "a prompt"}}, 400, "prompt"),
    ],
)
def test_a_wrong_request_gets_openais_error_naming_the_field(
    suite: Suite, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": "sim", "prompt": "Hello", "max_tokens": 4} | change
    refused = httpx.post(f"{suite.url}/v1/completions", json=body, timeout=60, trust_env=False)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}


def test_malformed_json_is_refused(suite: Suite) -> None:
    refused = httpx.post(f"{suite.url}/v1/completions", content=b'{"model": ', timeout=60, trust_env=False)
    assert refused.status_code == 400
    assert "JSON" in refused.json()["error"]["message"]


def test_nothing_listens_beyond_this_machine(suite: Suite) -> None:
    listening = [
        ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
        for pid in suite.tokenmill.processes()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 12, "etcd's two, NATS, four gRPC servers, four of metrics, HTTP"
    assert all(address.is_loopback for address in listening), listening
