"""What a token costs a worker from the engine's step to the socket, at full speed over one Attach stream.

    python benchmarks/bench_attach.py [STREAMS] [TOKENS PER STREAM] [STEP MICROSECONDS]

The engine here only makes up tokens; what that costs is measured too and not counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from engines.base import EngineInfo, EngineRequest, FinishReason, StepOutput, StepSink, Usage
from engines.host.decode_service import DecodeService
from engines.host.live import DecodeLimits
from engines.host.started import StartedEngine
from kvcache.format import KvFormat
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc

INFO = EngineInfo(
    model="bench",
    tokenizer="builtin",
    format=KvFormat("weights", "float32", 16, "flat", "bench", "1", "tp1-pp1"),
    total_blocks=1,
    max_num_seqs=4096,
    max_batched_tokens=1,
    max_model_len=1 << 20,
    vocab_size=1 << 20,
)


class MadeUpTokens:
    """As much of an engine as a decode worker touches: a token for every request each step."""

    def __init__(self, streams: int, tokens: int, step_s: float) -> None:
        self._streams = streams
        self._tokens = tokens
        self._step_s = step_s
        self.requests: list[str] = []
        self._run: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()

    async def generate(self, request: EngineRequest, sink: StepSink) -> None:
        """Begins to step once all have come."""
        self.requests.append(request.request_id)
        if len(self.requests) == self._streams:
            self._run = asyncio.create_task(self.run(sink))

    def abort(self, request_id: str) -> bool:
        """Everything is finished by the time this is asked."""
        return False

    async def run(self, sink: StepSink) -> None:
        """All steps, then all ends."""
        for token in range(self._tokens):
            sink([StepOutput(request_id, [100_000 + token]) for request_id in self.requests])
            await asyncio.sleep(self._step_s)
        usage = Usage(1, self._tokens)
        sink([StepOutput(request_id, [], FinishReason.LENGTH, usage) for request_id in self.requests])
        self.finished.set()


async def worker(pipe: Connection, streams: int, tokens: int, step_s: float) -> None:
    """Serves the answers; tells the CPU time they took."""
    engine = MadeUpTokens(streams, tokens, step_s)
    service = DecodeService(DecodeLimits(max_unsent_bytes=1 << 30))
    server = grpc.aio.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    service.serve(StartedEngine(engine, INFO, "bench", 1, "", CollectorRegistry(), lambda _: None))  # type: ignore[arg-type]

    alone = MadeUpTokens(streams, tokens, step_s)
    alone.requests = [f"r{number}" for number in range(streams)]
    before = time.process_time()
    await alone.run(lambda _: None)
    engine_alone = time.process_time() - before

    pipe.send(port)
    await asyncio.to_thread(pipe.recv)  # everything is submitted
    before = time.process_time()
    await engine.finished.wait()
    await asyncio.to_thread(pipe.recv)  # and received
    pipe.send(time.process_time() - before - engine_alone)
    await server.stop(0)


async def frontend(pipe: Connection, streams: int, tokens: int) -> None:
    """Submits, reads and prints."""
    port = await asyncio.to_thread(pipe.recv)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        call = stub.Attach(decode_pb2.AttachRequest(attach_id="bench"))
        await call.initial_metadata()
        for slot in range(streams):
            if slot == streams - 1:
                pipe.send("begin")
                started, before = time.monotonic(), time.process_time()
            request = decode_pb2.SubmitRequest(
                request_id=f"r{slot}", model="bench", attach_id="bench", slot=slot, prompt_token_ids=[1]
            )
            await stub.Submit(request)
        received = finished = messages = 0
        async for batch in call:
            received += len(batch.token_ids)
            finished += len(batch.finished)
            messages += 1
            if finished == streams:
                break
        wall, cpu = time.monotonic() - started, time.process_time() - before
        pipe.send("received")
        worker_cpu = await asyncio.to_thread(pipe.recv)
    assert received == streams * tokens, f"{received} of {streams * tokens} tokens"
    print(
        f"{streams} streams x {tokens} tokens in {messages} messages, {received / wall:,.0f} tokens/s; "
        f"CPU a token: worker {worker_cpu / received * 1e6:.2f} us, reader {cpu / received * 1e6:.2f} us; "
        f"a message: worker {worker_cpu / messages * 1e6:.0f} us"
    )


def _worker_process(pipe: Connection, streams: int, tokens: int, step_s: float) -> None:
    uvloop.run(worker(pipe, streams, tokens, step_s))


def main() -> None:
    """Runs a worker process and reads from it."""
    streams, tokens, step_us = (int(given) for given in (sys.argv[1:] + ["64", "2000", "0"][len(sys.argv) - 1 :]))
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_worker_process, args=(theirs, streams, tokens, step_us / 1e6))
    process.start()
    uvloop.run(frontend(ours, streams, tokens))
    process.join()


if __name__ == "__main__":
    main()
