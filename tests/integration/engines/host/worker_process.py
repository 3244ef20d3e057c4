"""Prefill and decode workers as processes of their own, on the simulated engine, and how to talk to them."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.instances import Instance, State
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc

from .peers import Frontend, until

PROMPT = [256 + (7 * i) % 200 for i in range(100)]
START_TIMEOUT_S = 120


@dataclass
class WorkerProcess:
    """One worker, and how to talk to it."""

    process: asyncio.subprocess.Process
    instance: Instance
    channel: grpc.aio.Channel
    attach_id: str = ""

    @property
    def decode(self) -> Any:
        return decode_pb2_grpc.DecodeStub(self.channel)

    @property
    def prefill(self) -> Any:
        return prefill_pb2_grpc.PrefillStub(self.channel)

    async def metrics(self) -> dict[str, float]:
        """Every sample, by name and labels as Prometheus writes them."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{self.instance.metrics_address}/metrics")).text
        return {
            sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Frontend]:
        frontend = Frontend()
        self.attach_id = uuid.uuid4().hex
        call = self.decode.Attach(decode_pb2.AttachRequest(attach_id=self.attach_id))
        await call.initial_metadata()
        reader = asyncio.create_task(frontend.read(call))
        try:
            yield frontend
        finally:
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def submit(self, slot: int, max_tokens: int = 20, kv: common_pb2.KvHandle | None = None) -> None:
        await self.decode.Submit(
            decode_pb2.SubmitRequest(
                request_id=f"r{slot}",
                model="sim",
                attach_id=self.attach_id,
                slot=slot,
                prompt_token_ids=PROMPT,
                sampling=common_pb2.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
                kv=kv,
            ),
            timeout=60,
        )

    async def answer(self, kv: common_pb2.KvHandle | None = None) -> tuple[list[int], decode_pb2.Finished]:
        """The tokens of one answer, and its end."""
        async with self.attached() as frontend:
            await self.submit(1, kv=kv)
            await until(lambda: 1 in frontend.finished, timeout_s=20)
        return frontend.tokens[1], frontend.finished[1]

    async def run_prompt(self) -> common_pb2.KvHandle:
        request = prefill_pb2.RunRequest(request_id="r1", model="sim", prompt_token_ids=PROMPT)
        return (await self.prefill.Run(request, timeout=60)).handle

    async def holds(self, leases: int, *, expired: int = 0) -> None:
        """Waits for the metrics to say so; they are read from the engine each second."""

        async def shown() -> bool:
            metrics = await self.metrics()
            now = metrics["tokenmill_kv_leases"], metrics["tokenmill_kv_leases_expired_total"]
            return now == (leases, expired)

        await until(shown, timeout_s=60)


@pytest.fixture
async def discovery(etcd: str, deployment: str) -> AsyncIterator[Discovery]:
    """What others see of the deployment."""
    discovery = await Discovery.connect(etcd, deployment, CollectorRegistry())
    yield discovery
    await discovery.close()


StartWorker = Callable[..., Awaitable[WorkerProcess]]


@pytest.fixture
async def start_worker(
    etcd: str, nats: str, deployment: str, discovery: Discovery, tmp_path: Path
) -> AsyncIterator[StartWorker]:
    """`await start_worker("decode", "--flag", "value")`: returns once others see it READY."""
    async with AsyncExitStack() as at_end:
        channels = Channels()
        at_end.push_async_callback(channels.close)

        async def start(role: str, *flags: str) -> WorkerProcess:
            name = f"{role}-1"
            log = tmp_path / f"{name}.log"
            with log.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", f"services.{role}", "--etcd", etcd, "--nats", nats, "--deployment",
                    deployment, "--instance-id", name, "--engine", "sim", *flags, stderr=stderr,
                )  # fmt: skip

            async def end() -> None:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

            at_end.push_async_callback(end)

            def ready() -> bool:
                assert process.returncode is None, log.read_text()
                instance = discovery.instances.get(name)
                return instance is not None and instance.state is State.READY

            try:
                await until(ready, START_TIMEOUT_S)
            except TimeoutError:
                raise AssertionError(log.read_text()) from None
            instance = discovery.instances[name]
            return WorkerProcess(process, instance, channels.get(instance.address))

        yield start
