"""Peers of a frontend under test: its own process, and workers and a router that do what a test scripts.

They are real gRPC servers, published in etcd as real ones are; only what they answer is the test's.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.embedded import free_port
from controlplane.errors import TokenmillError, Unavailable
from controlplane.grpc_errors import ErrorInterceptor
from controlplane.instances import Instance, ModelCard, State
from engines.base import Capability
from engines.sim.tokenizer import BUILTIN_EOS_TOKEN_ID, BUILTIN_VOCAB_SIZE
from kvcache.format import KvFormat
from services.frontend.tokenizer import Tokenizer
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

TOKENIZER = Tokenizer.load("builtin")
MAX_MODEL_LEN = 512
Context = grpc.aio.ServicerContext[Any, Any]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Frontend:
    """A running `tokenmill frontend`."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    etcd: str
    deployment: str
    tls: bool = False

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http_port}" if self.tls else f"http://127.0.0.1:{self.http_port}"


@contextmanager
def running_frontend(
    etcd: str, nats: str, log: Path, *flags: str, tls: ssl.SSLContext | None = None
) -> Iterator[Frontend]:
    """With `tls` to trust it by, where the flags give it a certificate."""
    deployment, http_port, grpc_port = f"test-{uuid.uuid4().hex[:8]}", free_port(), free_port()
    command = [
        sys.executable, "-m", "services.frontend", "--etcd", etcd, "--nats", nats, "--deployment", deployment,
        "--port", str(http_port), "--grpc-port", str(grpc_port), *flags,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
        frontend = Frontend(process, http_port, grpc_port, etcd, deployment, tls is not None)
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    httpx.get(f"{frontend.url}/health", verify=tls or True).raise_for_status()
                    break
                except httpx.TransportError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError(f"the frontend did not start: {log.read_text()}") from None
                    time.sleep(0.02)
            yield frontend
        finally:
            process.kill()
            process.wait()


@dataclass
class Stream:
    """One frontend's Attach stream at a scripted worker."""

    attach_id: str
    outgoing: asyncio.Queue[decode_pb2.StepBatch] = field(default_factory=asyncio.Queue)

    def send(self, slot: int, token_ids: Sequence[int], finish: decode_pb2.Finished | None = None) -> None:
        batch = decode_pb2.StepBatch()
        if token_ids:
            batch = decode_pb2.StepBatch(slots=[slot], counts=[len(token_ids)], token_ids=token_ids)
        if finish is not None:
            batch.finished.append(finish)
        self.outgoing.put_nowait(batch)


@dataclass
class Live:
    """One request at a scripted worker."""

    request: decode_pb2.SubmitRequest
    stream: Stream
    metadata: dict[str, str]

    def send(self, text: str | Sequence[int]) -> None:
        self.stream.send(self.request.slot, ids(text) if isinstance(text, str) else text)

    def finish(
        self,
        reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_STOP,
        tokens: int = 0,
        error: TokenmillError | None = None,
    ) -> None:
        usage = common_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids), completion_tokens=tokens, cached_tokens=3,
            remote_tokens=self.request.kv.tokens,
        )  # fmt: skip
        finished = decode_pb2.Finished(slot=self.request.slot, reason=reason, usage=usage)
        if error is not None:
            finished.error.CopyFrom(common_pb2.Error(code=error.code, message=error.message))
        self.stream.send(self.request.slot, (), finished)


Script = Callable[[Live], Awaitable[None]]


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    """Runs its script for each request it is given."""

    def __init__(self, script: Script) -> None:
        self.model = f"model-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self.instance_id = ""
        self.requests: list[Live] = []
        self.cancelled: dict[str, float] = {}
        """Request id -> when, in the loop's time."""
        self.refusal: TokenmillError | None = None
        self.heartbeats = True
        self.submit_delay_s = 0.0
        self.attach_refusal: TokenmillError | None = None
        self.server: grpc.aio.Server | None = None
        self._script = script
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def Submit(self, request: decode_pb2.SubmitRequest, context: Context) -> decode_pb2.SubmitResponse:  # noqa: N802
        await asyncio.sleep(self.submit_delay_s)
        if self.refusal is not None:
            raise self.refusal
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        live = Live(request, self._streams[request.attach_id], metadata)
        self.requests.append(live)
        task = asyncio.create_task(self._run(live))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return decode_pb2.SubmitResponse()

    async def _run(self, live: Live) -> None:
        await self._script(live)

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Context) -> decode_pb2.CancelResponse:  # noqa: N802
        now = asyncio.get_running_loop().time()
        self.cancelled |= dict.fromkeys(request.request_ids, now)
        for live in self.requests:
            if live.request.request_id in request.request_ids:
                live.finish(common_pb2.FINISH_REASON_CANCELLED)
        return decode_pb2.CancelResponse(cancelled=len(request.request_ids))

    async def Attach(self, request: decode_pb2.AttachRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        if self.attach_refusal is not None:
            raise self.attach_refusal
        stream = self._streams[request.attach_id] = Stream(request.attach_id)
        await context.send_initial_metadata(())
        while True:
            try:
                async with asyncio.timeout(0.5):
                    batch = await stream.outgoing.get()
            except TimeoutError:
                if not self.heartbeats:
                    continue
                batch = decode_pb2.StepBatch()
            await context.write(batch)


def card_of(model: str, **changes: Any) -> ModelCard:
    fields = {
        "name": model, "tokenizer": "builtin", "max_model_len": MAX_MODEL_LEN, "vocab_size": BUILTIN_VOCAB_SIZE,
        "format": KvFormat("fingerprint", "float32", 16, "blocks", "sim", "1", "tp1-pp1"), "total_blocks": 100,
        "max_num_seqs": 64, "max_batched_tokens": 512, "eos_token_ids": (BUILTIN_EOS_TOKEN_ID,),
        "capabilities": tuple(capability.value for capability in Capability),
    }  # fmt: skip
    return ModelCard(**fields | changes)


@asynccontextmanager
async def published(
    frontend: Frontend,
    service: str,
    add: Callable[[grpc.aio.Server], object],
    model: ModelCard | None = None,
    instance_id: str = "",
) -> AsyncIterator[tuple[Instance, grpc.aio.Server, Discovery]]:
    """A gRPC server, and its record in etcd."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    discovery = await Discovery.connect(frontend.etcd, frontend.deployment, CollectorRegistry(), timeout_s=60)
    instance = Instance(
        service=service, instance_id=instance_id or f"{service}-{uuid.uuid4().hex[:8]}", state=State.READY,
        epoch=time.time_ns(), address=f"127.0.0.1:{port}", pid=0, host="here", version="0",
        role="" if service == "router" else service, model=model,
    )  # fmt: skip
    await discovery.register(instance)
    try:
        yield instance, server, discovery
    finally:
        await discovery.deregister()
        await discovery.close()
        await server.stop(None)


@asynccontextmanager
async def serving(
    frontend: Frontend, worker: ScriptedDecode, *, instance_id: str = "", **card: Any
) -> AsyncIterator[ScriptedDecode]:
    """A decode worker in the frontend's deployment; returns when the frontend serves its model."""

    def add(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)

    model = card_of(worker.model, **card)
    async with published(frontend, "decode", add, model, instance_id) as (instance, server, _):
        worker.address, worker.instance_id, worker.server = instance.address, instance.instance_id, server
        async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(60):
            while (await client.get(f"{frontend.url}/v1/models/{worker.model}")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield worker


async def until_workers(frontend_address: str, model: str, count: int) -> None:
    """Waits until the frontend has streams to so many workers of this model."""
    async with grpc.aio.insecure_channel(frontend_address) as channel, asyncio.timeout(60):
        stub = inference_pb2_grpc.InferenceStub(channel)
        while True:
            listed = await stub.ListModels(inference_pb2.ListModelsRequest())
            if any(one.name == model and one.ready_workers == count for one in listed.models):
                return
            await asyncio.sleep(0.02)


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Places where the test says, and remembers what it was asked and told."""

    def __init__(self) -> None:
        self.targets: list[ScriptedDecode] = []
        """Tried in order, leaving out what the request excludes."""
        self.prefill: router_pb2.Target | None = None
        self.epoch = 0
        """Of its targets."""
        self.server: grpc.aio.Server | None = None
        self.refusal: TokenmillError | None = None
        self.delay_s = 0.0
        self.asked: list[router_pb2.ScheduleRequest] = []
        self.told: list[router_pb2.Outcome] = []

    async def Schedule(  # noqa: N802
        self, request: router_pb2.ScheduleRequest, context: Context
    ) -> router_pb2.ScheduleResponse:
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        if self.refusal is not None:
            raise self.refusal
        for worker in self.targets:
            if worker.instance_id not in request.excluded_instances:
                target = router_pb2.Target(instance_id=worker.instance_id, address=worker.address, epoch=self.epoch)
                return router_pb2.ScheduleResponse(decode=target, prefill=self.prefill)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker is left")
        raise AssertionError

    async def Report(self, request: router_pb2.ReportRequest, context: Context) -> router_pb2.ReportResponse:  # noqa: N802
        self.told += request.outcomes
        return router_pb2.ReportResponse()


class ScriptedPrefill(prefill_pb2_grpc.PrefillServicer):
    """Hands out handles, or refuses, or takes its time."""

    def __init__(self) -> None:
        self.ran: list[prefill_pb2.RunRequest] = []
        self.released: list[str] = []
        """By handle."""
        self.given_up: list[str] = []
        """By request."""
        self.refusal: TokenmillError | None = None
        self.delay_s = 0.0
        self.cancelled = 0
        self.deaf_to_releases = 0
        """How many to refuse."""
        self.address = ""

    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:  # noqa: N802
        self.ran.append(request)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        handle = common_pb2.KvHandle(
            handle_id=f"kv-{request.request_id}", epoch=7, address=self.address, remaining_lease_ms=60_000,
            lease_ms=60_000, tokens=len(request.prompt_token_ids),
        )  # fmt: skip
        return prefill_pb2.RunResponse(handle=handle, cached_tokens=5, elapsed_ms=9)

    async def Release(  # noqa: N802
        self, request: prefill_pb2.ReleaseRequest, context: Context
    ) -> prefill_pb2.ReleaseResponse:
        assert request.epoch == 7
        if self.deaf_to_releases:
            self.deaf_to_releases -= 1
            raise Unavailable("deaf")
        if request.handle_id:
            self.released.append(request.handle_id)
        else:
            self.given_up.append(request.request_id)
        return prefill_pb2.ReleaseResponse(released=True)


@asynccontextmanager
async def routing(frontend: Frontend, router: ScriptedRouter | None = None) -> AsyncIterator[ScriptedRouter]:
    """A router in the frontend's deployment; the frontend asks it as soon as it has seen it."""
    router = router or ScriptedRouter()
    add = router_pb2_grpc.add_RouterServicer_to_server
    async with published(frontend, "router", lambda server: add(router, server)) as (_, router.server, _):
        yield router


@asynccontextmanager
async def prefilling(frontend: Frontend, router: ScriptedRouter, model: str) -> AsyncIterator[ScriptedPrefill]:
    """A prefill worker that the router places on from now on."""
    prefill = ScriptedPrefill()
    add = prefill_pb2_grpc.add_PrefillServicer_to_server
    async with published(frontend, "prefill", lambda server: add(prefill, server), card_of(model)) as (instance, _, _):
        prefill.address = instance.address
        router.prefill = router_pb2.Target(instance_id=instance.instance_id, epoch=7, address=instance.address)
        yield prefill
