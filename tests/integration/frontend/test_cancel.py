"""A client that goes ends all work for it, whatever has become of its request by then, and is counted by that.

Scripted peers hold a request at a stage for as long as a test needs; real workers on a slow simulated engine show that
nothing is left in them. How soon a worker hears of it, `test_http_edges` measures.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from controlplane.discovery import Discovery
from controlplane.instances import Instance, State
from tests.integration.frontend.peers import (
    Context,
    Frontend,
    Live,
    ScriptedDecode,
    ScriptedRouter,
    ids,
    prefilling,
    routing,
    running_frontend,
    serving,
    until,
)
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc
from tokenmill.router.v1 import router_pb2

PATIENT = ("--schedule-timeout-s", "60", "--client-buffer-kb", "65536")
KINDS = ("whole", "stream", "half-close", "grpc")


@pytest.fixture(scope="module")
def patient(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """Waits for a router as long as it takes, and for a client that does not read."""
    with running_frontend(etcd, nats, tmp_path_factory.mktemp("patient") / "log", *PATIENT) as frontend:
        yield frontend


async def cancelled(frontend: Frontend) -> Counter[str]:
    """Answers by stage, so far."""
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    return Counter(
        {
            sample.labels["stage"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tokenmill_cancelled_total"
        }
    )


@asynccontextmanager
async def counted(frontend: Frontend, **stages: int) -> AsyncIterator[None]:
    """What happens inside cancels so many answers at these stages, and no others."""
    before = await cancelled(frontend)
    yield
    with suppress(TimeoutError):  # the comparison below says more
        async with asyncio.timeout(60):
            while (await cancelled(frontend) - before).total() < sum(stages.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert await cancelled(frontend) - before == Counter(stages)


@dataclass
class Client:
    """One who has asked."""

    go: Callable[[], object]
    read: Callable[[], Any]
    """A coroutine that ends with the first part of a streamed answer."""


@asynccontextmanager
async def asking(frontend: Frontend, kind: str, model: str, prompt: str = "x", **more: Any) -> AsyncIterator[Client]:
    """Asks, and lets the test go when it wants."""
    if kind == "grpc":
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel:
            request = inference_pb2.GenerateRequest(model=model, prompt=prompt)
            request.sampling.max_tokens = more.get("max_tokens", 100)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            yield Client(call.cancel, call.read)
            call.cancel()
        return
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that what is not read soon stops the writer
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", frontend.http_port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2048)
        body = json.dumps({"model": model, "prompt": prompt, "stream": kind != "whole", **more}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        go = writer.write_eof if kind == "half-close" else writer.close
        yield Client(go, lambda: reader.readuntil(b'"text":"'))
        writer.close()


async def be_silent(live: Live) -> None:
    """Nothing comes."""


async def begin(live: Live) -> None:
    live.send("begin")


class NeverAttaches(decode_pb2_grpc.DecodeServicer):
    """A decode worker that lets frontends wait for their stream."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.instance_id = "never-attaches"
        self.address = ""

    async def Attach(self, request: decode_pb2.AttachRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = grpc.aio.server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)


@pytest.mark.parametrize("kind", KINDS)
async def test_queued_at_the_router(patient: Frontend, kind: str) -> None:
    async with routing(patient) as router, serving(patient, ScriptedDecode(be_silent)) as worker:
        await until_routed(patient, router, worker)
        router.delay_s = 60
        asked = len(router.asked)
        async with counted(patient, queued=1), asking(patient, kind, worker.model) as client:
            await until(lambda: len(router.asked) > asked)
            client.go()
        await until(lambda: any(one.HasField("freed") for one in router.told))


async def until_routed(frontend: Frontend, router: ScriptedRouter, worker: ScriptedDecode) -> None:
    """Until the frontend has seen the router: it is asked."""
    router.targets = [worker]
    async with asyncio.timeout(60):
        while not router.asked:
            async with asking(frontend, "stream", worker.model, max_tokens=1) as client:
                asked = len(worker.requests)
                await until(lambda: len(worker.requests) > asked)  # noqa: B023
                worker.requests[-1].send("x")
                worker.requests[-1].finish(tokens=1)
                await client.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["placed", "prefilled"])
async def test_before_decode_knows_of_it(patient: Frontend, kind: str, stage: str) -> None:
    waiting = NeverAttaches()
    async with (
        routing(patient) as router,
        serving(patient, ScriptedDecode(be_silent)) as worker,
        prefilling(patient, router, worker.model) as prefill,
        waiting.listening(),
    ):
        target, router.prefill = router.prefill, None
        await until_routed(patient, router, worker)
        router.targets = [waiting]  # type: ignore[list-item]
        router.prefill = target if stage == "prefilled" else None
        async with counted(patient, **{stage: 1}), asking(patient, kind, worker.model) as client:
            async with asyncio.timeout(60):
                await waiting.asked.wait()
            client.go()
        if stage == "prefilled":
            await until(lambda: prefill.released)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["prefilling", "transferring"])
async def test_while_its_kv_is_made_or_moved(patient: Frontend, kind: str, stage: str) -> None:
    async with (
        routing(patient) as router,
        serving(patient, ScriptedDecode(be_silent)) as worker,
        prefilling(patient, router, worker.model) as prefill,
    ):
        target, router.prefill = router.prefill, None
        await until_routed(patient, router, worker)
        router.prefill = target
        prefill.delay_s = 60 if stage == "prefilling" else 0
        heard = len(worker.requests)
        async with counted(patient, **{stage: 1}), asking(patient, kind, worker.model) as client:
            await until(lambda: prefill.ran if stage == "prefilling" else len(worker.requests) > heard)
            client.go()
        if stage == "prefilling":
            await until(lambda: prefill.cancelled and prefill.given_up)
        else:
            await until(lambda: worker.cancelled and prefill.released)


@pytest.mark.parametrize(("kind", "n"), [("stream", 1), ("stream", 3), ("half-close", 1), ("grpc", 1)])
async def test_decoding(patient: Frontend, kind: str, n: int) -> None:
    async with serving(patient, ScriptedDecode(begin)) as worker:
        more = {"n": n} if n > 1 else {}
        async with counted(patient, decoding=n), asking(patient, kind, worker.model, **more) as client:
            await until(lambda: len(worker.requests) == n)
            async with asyncio.timeout(60):
                for _ in range(n):
                    await client.read()
            client.go()
        await until(lambda: len(worker.cancelled) == n)


async def test_all_tokens_are_there_and_the_client_does_not_read_them(patient: Frontend) -> None:
    async def pour_once(live: Live) -> None:
        if len(worker.requests) == 1:
            text = ids(" garden" * 1500)  # in all more than the kernel takes
            for _ in range(1600):
                live.send(text)
        live.finish(tokens=1)

    async with serving(patient, ScriptedDecode(pour_once)) as worker:
        async with counted(patient, writing=1), asking(patient, "stream", worker.model) as client:
            await client.read()
            async with httpx.AsyncClient(base_url=patient.url, timeout=60) as http:
                # It comes behind all that was poured, so the frontend has taken that when it is answered.
                other = await http.post("/v1/completions", json={"model": worker.model, "prompt": "x"})
                assert other.status_code == 200
            client.go()
        assert worker.cancelled == {}


async def test_tokenising(patient: Frontend) -> None:
    serving_long = serving(patient, ScriptedDecode(be_silent), max_model_len=300_000)
    async with serving_long as worker, AsyncExitStack() as stack:
        before = await cancelled(patient)
        writers = []
        for number in range(40):  # more tokens than the model takes: nothing comes after the tokenising
            _, writer = await asyncio.open_connection("127.0.0.1", patient.http_port)
            stack.callback(writer.close)
            body = json.dumps({"model": worker.model, "prompt": f"{number} the garden " * 230_000}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            writers.append(writer)
        async with httpx.AsyncClient(base_url=patient.url, timeout=60) as http, asyncio.timeout(120):

            async def running() -> bool:
                return "tokenmill_running_answers 0.0" not in (await http.get("/metrics")).text

            while not await running():
                pass
            for writer in writers:
                writer.close()
            while await running():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await cancelled(patient) - before)["tokenising"]


# Real workers.

PROFILE = "step_us = 20000\nprefill_us = 8000\ndecode_us = 10\ncontext_us = 0\n"
LONG = "The river, the garden and the letter. " * 120
LOADS = ("running_requests", "waiting_requests", "kv_leases", "kv_leased_blocks", "kv_used_blocks")


@dataclass
class Suite:
    """A frontend with one real worker of each role, and where they are."""

    frontend: Frontend
    prefill: router_pb2.Target
    decode: router_pb2.Target
    metrics: dict[str, str]
    """URL by role."""

    async def loads(self, role: str) -> dict[str, float]:
        """What a worker says of itself, about once a second."""
        async with httpx.AsyncClient(timeout=60) as http:
            text = (await http.get(self.metrics[role])).text
        samples = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
        return {name: samples[f"tokenmill_{name}"] for name in LOADS}

    async def until(self, condition: Callable[[dict[str, float], dict[str, float]], Any]) -> None:
        """Waits for the loads of prefill and decode to be so."""
        async with asyncio.timeout(60):
            while not condition(await self.loads("prefill"), await self.loads("decode")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def suite(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    logs = tmp_path_factory.mktemp("cancel")
    (logs / "slow.toml").write_text(PROFILE)
    with running_frontend(etcd, nats, logs / "frontend", *PATIENT) as frontend, ExitStack() as stack:
        flags = ["--etcd", etcd, "--nats", nats, "--deployment", frontend.deployment]
        engine = [
            "--engine",
            "sim",
            "--sim-profile",
            str(logs / "slow.toml"),
            "--kv-lease-s",
            "60",
            "--max-batched-tokens",
            "64",
        ]
        for role in ("prefill", "decode"):
            command = [sys.executable, "-m", f"services.{role}", *flags, *engine]
            process = subprocess.Popen(command, stderr=stack.enter_context((logs / role).open("wb")))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield asyncio.run(served(frontend))


async def served(frontend: Frontend) -> Suite:
    """The suite, once its workers are ready and the frontend serves their model."""
    discovery = await Discovery.connect(frontend.etcd, frontend.deployment, CollectorRegistry(), timeout_s=60)
    workers: dict[str, Instance] = {}
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=frontend.url, timeout=60) as http:
        while len(workers) < 2:
            await asyncio.sleep(0.05)
            ready = [one for one in discovery.instances.values() if one.state is State.READY]
            workers = {one.role: one for one in ready if one.role}
        while (await http.get("/v1/models/sim")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await discovery.close()
    targets = {
        role: router_pb2.Target(instance_id=one.instance_id, epoch=one.epoch, address=one.address)
        for role, one in workers.items()
    }
    urls = {role: f"http://{one.metrics_address}/metrics" for role, one in workers.items()}
    return Suite(frontend, targets["prefill"], targets["decode"], urls)


@pytest.mark.parametrize("kind", ["stream", "grpc"])
@pytest.mark.parametrize("stage", ["prefilling", "prefilled", "transferring", "decoding"])
async def test_nothing_is_left_in_either_worker(suite: Suite, stage: str, kind: str) -> None:
    """The decode worker is scripted where it must dawdle; then the KV is a real worker's, and given back there."""
    frontend = suite.frontend
    waiting, silent = NeverAttaches(), ScriptedDecode(be_silent)
    async with routing(frontend) as router, serving(frontend, silent) as scripted, waiting.listening():
        await until_routed(frontend, router, scripted)
        decode = {"prefilled": waiting, "transferring": scripted}.get(stage, suite.decode)
        router.targets = [decode]  # type: ignore[list-item]
        router.prefill = suite.prefill if stage != "decoding" else None
        prompt = LONG if stage == "prefilling" else LONG[:200]
        async with counted(frontend, **{stage: 1}), asking(frontend, kind, "sim", prompt, max_tokens=400) as client:
            async with asyncio.timeout(60):
                if stage == "prefilling":
                    await suite.until(lambda prefill, decode: prefill["running_requests"])
                elif stage == "prefilled":
                    await waiting.asked.wait()  # the frontend waits for its stream for three seconds
                elif stage == "transferring":
                    heard = len(scripted.requests) - 1
                    await until(lambda: len(scripted.requests) > heard)
                    await suite.until(lambda prefill, decode: prefill["kv_leases"])
                else:
                    await client.read()
            client.go()
        await suite.until(lambda *loads: not any(value for load in loads for value in load.values()))
