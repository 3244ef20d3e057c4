"""Simulated engines to test: one in this process, prefill workers in others."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.base import EngineRequest, Handle, Role, SamplingParams, StepOutput
from engines.sim.config import SimConfig
from engines.sim.engine import SimEngine
from kvcache.events import KvEvent
from kvcache.format import KvFormat

HASH_SEED = 77
DEFAULTS: dict[str, Any] = {"time_scale": 0, "total_blocks": 256, "max_model_len": 2048, "kv_bytes_per_block": 65536}


class PrefillWorker:
    """A prefill engine in another process."""

    def __init__(self, **config: Any) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("worker.py")),
                json.dumps(DEFAULTS | config),
                str(HASH_SEED),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.format = KvFormat(**self._answer()["format"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    async def _ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        async with asyncio.timeout(30):
            return await asyncio.to_thread(self._answer)

    async def prefill(self, prompt: Sequence[int]) -> Handle:
        answer = await self._ask(do="prefill", prompt=list(prompt))
        return Handle(
            handle_id=answer["handle_id"],
            instance_id="prefill-1",
            epoch=1,
            address="",
            format=self.format,
            tokens=answer["tokens"],
            engine_params=base64.b64decode(answer["engine_params"]),
            digests=tuple(bytes.fromhex(digest) for digest in answer["digests"]),
            received_at=time.monotonic(),
            lease_s=answer["lease_s"],
        )

    async def leases(self) -> int:
        return int((await self._ask(do="load"))["kv_leases"])

    async def used_blocks(self) -> int:
        return int((await self._ask(do="load"))["kv_used_blocks"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Engine:
    """A simulated engine here, whose answers can be awaited."""

    def __init__(self, **config: Any) -> None:
        self.sim = SimEngine(SimConfig(**(DEFAULTS | config)), Role.DECODE, "decode-1", HASH_SEED)
        self.events: list[KvEvent] = []
        self.calls = 0
        self._outputs: dict[str, list[StepOutput]] = {}
        self._ends: dict[str, asyncio.Future[list[StepOutput]]] = {}

    async def __aenter__(self) -> Engine:
        self.info = await self.sim.start(self.events.extend, lambda _: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sim.stop()

    def sink(self, outputs: Sequence[StepOutput]) -> None:
        self.calls += 1
        for output in outputs:
            self._outputs[output.request_id].append(output)
            if output.finish is not None:
                self._ends[output.request_id].set_result(self._outputs[output.request_id])

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        kv: Handle | None = None,
        **sampling: Any,
    ) -> asyncio.Future[list[StepOutput]]:
        self._outputs[request_id] = []
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        request = EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling), kv)
        await self.sim.generate(request, self.sink)
        return end

    async def answer(self, request_id: str, prompt: Sequence[int], **more: Any) -> tuple[list[int], StepOutput]:
        """All its tokens and its last output."""
        async with asyncio.timeout(30):
            outputs = await (await self.submit(request_id, prompt, **more))
        return [token for output in outputs for token in output.token_ids], outputs[-1]


async def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    """Waits for a condition of this process."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - some conditions come true in other processes
            await asyncio.sleep(0.01)
