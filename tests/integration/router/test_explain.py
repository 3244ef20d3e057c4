from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc
import msgspec
import pytest

from controlplane.errors import NotFound
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import State
from kvcache.events import Stored
from services.router.history import DecisionRecord
from tests.integration.router.cluster import Cluster, StartRouter, until
from tokenmill.router.v1 import router_pb2


async def tokenmill(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_a_decision_and_what_came_of_it_can_be_asked_for_later_and_is_logged(
    cluster: Cluster, start_router: StartRouter, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    router = await start_router(cluster, "--decisions-log", str(log))
    hashes = list(range(1, 33))
    one = await cluster.start("d-1", "decode")
    await cluster.start("d-2", "decode")
    await cluster.start("d-3", "decode", state=State.DRAINING)
    one.say(Stored(None, tuple(hashes[:20])))
    await until(lambda: router.agrees_with(cluster), "the index has the events")
    assert (await router.schedule(hashes, request_id="r-1", tokens=515)).decode.instance_id == "d-1"

    explained = await router.stub.Explain(router_pb2.ExplainRequest(request_id="r-1"), timeout=60)
    (comparison,) = explained.comparisons
    assert (explained.decode, comparison.job, comparison.best) == ("d-1", "whole", "d-1")
    assert {one.instance_id: one.terms["held_blocks"] for one in comparison.candidates} == {"d-1": 20, "d-2": 0}
    assert [(one.instance_id, one.filtered) for one in explained.filtered] == [("d-3", "draining")]
    assert explained.expected_cached_tokens == 20 * 16
    assert not explained.HasField("cached_tokens")

    outcomes = [
        router_pb2.Outcome(request_id="r-1", first_token=router_pb2.FirstToken(ttft_ms=120)),
        router_pb2.Outcome(request_id="r-1", freed=router_pb2.Freed(cached_tokens=304, completion_tokens=7)),
    ]
    await router.stub.Report(router_pb2.ReportRequest(outcomes=outcomes), timeout=60)
    where = ("--etcd", cluster.etcd, "--deployment", cluster.deployment)
    code, output, _ = await tokenmill("router", "explain", "r-1", "--json", *where)
    told = json.loads(output)
    assert (code, told["cached_tokens"], told["ttft_ms"], told["completion_tokens"]) == (0, 304, 120, 7)
    code, output, _ = await tokenmill("router", "explain", "r-1", *where)
    assert code == 0
    assert "d-1 decodes (20 of 32 blocks held)" in output
    assert "d-3" in output
    assert "draining" in output

    async def logged() -> bool:
        return log.read_bytes().endswith(b"\n")

    await until(logged, "the decision is in the log")
    record = msgspec.json.decode(log.read_bytes().splitlines()[0], type=DecisionRecord)
    assert (record.request_id, record.decode, record.cached_tokens) == ("r-1", "d-1", 304)
    assert record.block_hashes == hashes


async def test_a_request_that_no_router_knows_is_said_to_be_unknown(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await start_router(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await router.stub.Explain(router_pb2.ExplainRequest(request_id="r-9"), timeout=60)
    assert isinstance(from_rpc_error(failed.value), NotFound)
    where = ("--etcd", cluster.etcd, "--deployment", cluster.deployment)
    code, _, errors = await tokenmill("router", "explain", "r-9", *where)
    assert code == 1
    assert "no router knows the request 'r-9'" in errors


async def test_a_log_that_cannot_be_written_keeps_the_router_from_starting(
    cluster: Cluster, start_router: StartRouter, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", "--etcd", cluster.etcd, "--nats", cluster.nats,
        "--deployment", cluster.deployment, "--decisions-log", str(tmp_path / "nowhere" / "log"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode
    assert b"decisions_log" in output
