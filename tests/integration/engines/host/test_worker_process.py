"""Prefill and decode workers as processes of their own, on the simulated engine, with real etcd, NATS and NIXL."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from controlplane import kv_wire
from controlplane.bus import Bus
from controlplane.discovery import Discovery
from controlplane.errors import Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import State
from kvcache.load import LoadReport
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2
from tokenmill.kv.v1 import kv_pb2, kv_pb2_grpc

from .peers import until
from .worker_process import PROMPT, StartWorker


async def test_a_worker_that_is_ready_tells_what_it_serves(start_worker: StartWorker) -> None:
    worker = await start_worker("decode", "--served-model-name", "sim")
    instance = worker.instance
    assert (instance.role, instance.pid) == ("decode", worker.process.pid)
    assert instance.model is not None
    assert instance.model.name == "sim"
    assert "remote_prefill" in instance.model.capabilities
    health = health_pb2_grpc.HealthStub(worker.channel)
    for service in ("", "tokenmill.decode.v1.Decode", "tokenmill.kv.v1.KvSource"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.SERVING, service


async def test_a_worker_reports_its_load_and_its_blocks(start_worker: StartWorker, nats: str, deployment: str) -> None:
    bus = await Bus.connect(nats, CollectorRegistry())
    reports: list[LoadReport] = []
    await bus.subscribe(
        kv_wire.load_subject(deployment, "decode-1"),
        lambda _, data: reports.append(kv_wire.load_from_bytes(data)),
        lambda: None,
    )
    worker = await start_worker("decode")
    await worker.answer()
    await until(lambda: reports and reports[-1].held_blocks >= len(PROMPT) // 16, timeout_s=3)
    parts = [
        part async for part in kv_pb2_grpc.KvSourceStub(worker.channel).GetKvSnapshot(kv_pb2.GetKvSnapshotRequest())
    ]
    assert parts[0].epoch == reports[-1].epoch == worker.instance.epoch
    hashes = [block for part in parts for block in part.hashes]
    assert len(hashes) == reports[-1].held_blocks
    await bus.close()


async def test_a_signal_drains_while_a_stream_runs(start_worker: StartWorker, discovery: Discovery) -> None:
    worker = await start_worker("decode")
    async with worker.attached() as frontend:
        await worker.submit(1, max_tokens=200)
        await until(lambda: 1 in frontend.tokens)
        worker.process.send_signal(signal.SIGTERM)
        await until(lambda: discovery.instances["decode-1"].state is State.DRAINING)

        async def refused() -> bool:
            try:
                await worker.submit(2)
            except grpc.aio.AioRpcError as error:
                return isinstance(from_rpc_error(error), Unavailable)
            return False

        await until(refused)
        await until(lambda: 1 in frontend.finished, timeout_s=20)
    assert len(frontend.tokens[1]) == 200
    assert frontend.finished[1].reason == common_pb2.FINISH_REASON_LENGTH
    assert await asyncio.wait_for(worker.process.wait(), 10) == 0
    await until(lambda: "decode-1" not in discovery.instances)


async def test_a_second_signal_ends_a_drain(start_worker: StartWorker) -> None:
    worker = await start_worker("decode", "--drain-timeout-s", "60")
    async with worker.attached() as frontend:
        await worker.submit(1, max_tokens=20_000)
        await until(lambda: 1 in frontend.tokens)
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert worker.process.returncode is None
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.process.wait(), 20) == 130


async def test_an_answer_that_outlasts_the_drain_fails_and_the_worker_ends(start_worker: StartWorker) -> None:
    worker = await start_worker("decode", "--drain-timeout-s", "0.5")
    async with worker.attached() as frontend:
        await worker.submit(1, max_tokens=20_000)
        await until(lambda: 1 in frontend.tokens)
        worker.process.send_signal(signal.SIGTERM)
        await until(lambda: 1 in frontend.finished)
    assert frontend.finished[1].error.code == "draining"
    assert await asyncio.wait_for(worker.process.wait(), 10) == 0


async def test_a_bad_setting_ends_the_process_at_once(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "decode", "--engine", "sim", "--dtype", "float32", "--etcd", "127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "dtype" in errors.decode()


async def test_decode_answers_from_kv_that_prefill_computed(start_worker: StartWorker) -> None:
    prefill, decode = await asyncio.gather(start_worker("prefill"), start_worker("decode"))
    handle = await prefill.run_prompt()
    await prefill.holds(1)

    tokens, finished = await decode.answer(handle)
    assert tokens == (await decode.answer())[0]
    assert decode_pb2.KvOutcome.Name(finished.kv_outcome) == "KV_OUTCOME_READ"
    assert finished.usage.remote_tokens > 0
    assert (await decode.metrics())["tokenmill_kv_handoffs_total{outcome=read}"] == 1
    await prefill.holds(0)


async def test_an_old_handle_is_not_tried_and_is_released(start_worker: StartWorker) -> None:
    prefill, decode = await asyncio.gather(start_worker("prefill"), start_worker("decode"))
    handle = await prefill.run_prompt()
    handle.remaining_lease_ms -= 10_500

    _, finished = await decode.answer(handle)
    assert decode_pb2.KvOutcome.Name(finished.kv_outcome) == "KV_OUTCOME_TOO_OLD"
    assert finished.usage.remote_tokens == 0
    await prefill.holds(0)
    assert (await decode.metrics())["tokenmill_kv_handoffs_total{outcome=too_old}"] == 1


async def test_kv_of_another_format_is_not_tried(start_worker: StartWorker) -> None:
    prefill, decode = await asyncio.gather(start_worker("prefill", "--block-size", "32"), start_worker("decode"))
    _, finished = await decode.answer(await prefill.run_prompt())
    assert decode_pb2.KvOutcome.Name(finished.kv_outcome) == "KV_OUTCOME_INCOMPATIBLE"
    await prefill.holds(0)


async def test_corrupt_kv_is_thrown_away(start_worker: StartWorker) -> None:
    prefill, decode = await asyncio.gather(start_worker("prefill", "--fault", "corrupt-block"), start_worker("decode"))
    tokens, finished = await decode.answer(await prefill.run_prompt())
    assert tokens == (await decode.answer())[0]
    assert decode_pb2.KvOutcome.Name(finished.kv_outcome) == "KV_OUTCOME_CORRUPT"


async def test_kv_of_a_killed_worker_is_computed_again(start_worker: StartWorker) -> None:
    prefill, decode = await asyncio.gather(start_worker("prefill"), start_worker("decode"))
    handle = await prefill.run_prompt()
    prefill.process.kill()
    await prefill.process.wait()
    tokens, finished = await decode.answer(handle)
    assert tokens == (await decode.answer())[0]
    assert decode_pb2.KvOutcome.Name(finished.kv_outcome) == "KV_OUTCOME_UNREACHABLE"


async def test_a_lease_that_nobody_reads_ends_and_is_counted(start_worker: StartWorker) -> None:
    prefill = await start_worker("prefill", "--kv-lease-s", "0.5")
    await prefill.run_prompt()
    await prefill.holds(0, expired=1)
