"""Workers whose engine hangs while everything around it lives: heartbeats, health, RPCs."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.discovery import Discovery
from controlplane.errors import Stalled, Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import State
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2
from tokenmill.prefill.v1 import prefill_pb2

from .peers import until
from .worker_process import PROMPT, StartWorker, WorkerProcess

_NOTICED_S = 40
"""Ten times what is expected."""
_HANG, _GO_ON = signal.SIGUSR1, signal.SIGUSR2


async def _is_serving(worker: WorkerProcess) -> bool:
    answer = await health_pb2_grpc.HealthStub(worker.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _is_not_serving(worker: WorkerProcess) -> bool:
    return not await _is_serving(worker)


def _run(worker: WorkerProcess, request_id: str, **fields: Any) -> Any:
    request = prefill_pb2.RunRequest(request_id=request_id, model="sim", prompt_token_ids=PROMPT, **fields)
    return worker.prefill.Run(request, timeout=_NOTICED_S)


async def test_a_hung_engine_gives_up_its_answers_and_serves_again_when_it_moves(
    start_worker: StartWorker, discovery: Discovery
) -> None:
    worker = await start_worker("decode", "--fault", "hang")
    async with worker.attached() as frontend:
        await worker.submit(1, max_tokens=20_000)
        await until(lambda: 1 in frontend.tokens)
        worker.process.send_signal(_HANG)
        await until(lambda: 1 in frontend.finished, _NOTICED_S)
        assert frontend.finished[1].reason == common_pb2.FINISH_REASON_ERROR
        assert frontend.finished[1].error.code == "stalled"
        await until(lambda: _is_not_serving(worker), _NOTICED_S)
        await until(lambda: discovery.instances["decode-1"].state is State.STARTING, _NOTICED_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker.submit(2)
        assert isinstance(from_rpc_error(refused.value), Stalled)

        worker.process.send_signal(_GO_ON)
        await until(lambda: _is_serving(worker), _NOTICED_S)
        await until(lambda: discovery.instances["decode-1"].state is State.READY, _NOTICED_S)
        await worker.submit(3)
        await until(lambda: 3 in frontend.finished, _NOTICED_S)
    assert frontend.finished[3].reason == common_pb2.FINISH_REASON_LENGTH
    assert (await worker.metrics())["tokenmill_running_requests"] == 0


async def test_a_hung_prefill_engine_gives_up_its_prompts(start_worker: StartWorker) -> None:
    worker = await start_worker("prefill", "--fault", "hang")
    await _run(worker, "before")
    worker.process.send_signal(_HANG)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await _run(worker, "caught")
    assert isinstance(from_rpc_error(failed.value), Stalled)
    worker.process.send_signal(_GO_ON)
    await until(lambda: _is_serving(worker), _NOTICED_S)
    await _run(worker, "after")
    await worker.holds(2)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_idle_engine_that_hangs_is_noticed_by_the_hosts_own_request(
    start_worker: StartWorker, role: str
) -> None:
    worker = await start_worker(role, "--fault", "hang", "--canary-idle-s", "0.5")

    async def steps(least: int) -> bool:
        return (await worker.metrics())["tokenmill_steps_total"] >= least

    await until(lambda: steps(2), _NOTICED_S)
    assert await _is_serving(worker)
    worker.process.send_signal(_HANG)
    await until(lambda: _is_not_serving(worker), _NOTICED_S)
    worker.process.send_signal(_GO_ON)
    await until(lambda: _is_serving(worker), _NOTICED_S)
    metrics = await worker.metrics()
    assert metrics["tokenmill_kv_leases"] == 0
    counted = ("tokenmill_decode_requests_total", "tokenmill_decode_tokens_total", "tokenmill_prefill_runs_total")
    assert not any(value for name, value in metrics.items() if name.startswith(counted))


async def test_a_worker_that_hangs_for_long_ends_with_an_error(start_worker: StartWorker) -> None:
    worker = await start_worker("decode", "--fault", "hang", "--stall-timeout-s", "5")
    await worker.answer()
    async with worker.attached():
        worker.process.send_signal(_HANG)
        await worker.submit(2)
        assert await asyncio.wait_for(worker.process.wait(), 2 * _NOTICED_S) == 1


async def test_a_worker_refuses_what_is_meant_for_another_life_of_it(start_worker: StartWorker) -> None:
    decode, prefill = await asyncio.gather(start_worker("decode"), start_worker("prefill"))
    async with decode.attached():
        request = decode_pb2.SubmitRequest(
            request_id="r", model="sim", attach_id=decode.attach_id, prompt_token_ids=PROMPT,
            epoch=decode.instance.epoch - 1,
        )  # fmt: skip
        for call in (decode.decode.Submit(request, timeout=60), _run(prefill, "r", epoch=1)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert isinstance(from_rpc_error(refused.value), Unavailable)
            assert "epoch" in str(refused.value.details())
        request.epoch = decode.instance.epoch
        await decode.decode.Submit(request, timeout=60)
    await _run(prefill, "s", epoch=prefill.instance.epoch)
