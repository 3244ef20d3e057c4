"""A started vLLM engine, and all of them together, as tests drive them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engines.base import (
    EngineInfo,
    EngineRequest,
    FinishReason,
    Handle,
    KvOutcome,
    PrefillResult,
    Role,
    SamplingParams,
    StepOutput,
    Usage,
)
from engines.vllm.config import VllmConfig
from engines.vllm.engine import VllmEngine
from kvcache.events import KvEvent

HASH_SEED = 7
LEASE_S = 15.0
"""Long enough for any hand-off here, short enough to wait for its end."""
DEADLINE_S = 60.0
START_DEADLINE_S = 240.0
"""An engine takes 25 s to start on two idle cores, minutes on busy ones."""


async def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Waits until `condition` holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - some conditions are in other processes
            await asyncio.sleep(0.02)


@dataclass
class Answer:
    """All that a sink was given for one request."""

    steps: list[StepOutput] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    @property
    def last(self) -> StepOutput:
        return self.steps[-1]

    @property
    def outcome(self) -> KvOutcome:
        return self.last.kv_outcome

    def margin(self) -> float:
        """The least distance of any step's two best tokens; needs logprobs."""
        positions = [position for step in self.steps for position in step.logprobs or ()]
        return min(best.logprob - second.logprob for _, best, second in positions)

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage


class Running:
    """A started engine, with what a host would do for it."""

    def __init__(self, config: VllmConfig, role: Role) -> None:
        self.engine = VllmEngine(config, role, f"{role}-1", HASH_SEED)
        self.info: EngineInfo
        self.events: list[KvEvent] = []
        self.progress: list[str] = []
        self.batches: list[list[StepOutput]] = []
        """What the sink was called with."""
        self.processes: list[psutil.Process] = []
        """vLLM's, for this engine."""
        self._answers: dict[str, Answer] = {}
        self._count = 0

    async def start(self) -> Running:
        before = set(psutil.Process().children(recursive=True))
        self.info = await self.engine.start(self.events.extend, self.progress.append)
        after = set(psutil.Process().children(recursive=True)) - before
        self.processes = [process for process in after if process.name().startswith("VLLM")]
        assert len(self.processes) == 1, "an engine core, with its worker inside"
        return self

    async def kill(self) -> None:
        """Ends the engine's processes as a crash would, and waits until we have noticed."""
        for process in self.processes:
            process.kill()
        await eventually(lambda: self.engine.failed() is not None)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, the engine's processes stand still: they neither answer nor break off."""
        for process in self.processes:
            process.suspend()
        try:
            yield
        finally:
            for process in self.processes:
                process.resume()

    def sink(self, outputs: Sequence[StepOutput]) -> None:
        self.batches.append(list(outputs))
        for output in outputs:
            answer = self._answers[output.request_id]
            answer.steps.append(output)
            if output.finish is not None:
                answer.ended.set()

    def request_id(self) -> str:
        self._count += 1
        return f"request-{self._count}"

    async def begin(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        kv: Handle | None = None,
        priority: int = 0,
        request_id: str = "",
    ) -> tuple[str, Answer]:
        request_id = request_id or self.request_id()
        answer = self._answers[request_id] = Answer()
        await self.engine.generate(EngineRequest(request_id, tokens, sampling, kv, priority), self.sink)
        return request_id, answer

    async def answer(
        self, tokens: Sequence[int], max_tokens: int = 16, kv: Handle | None = None, logprobs: int | None = None
    ) -> Answer:
        """Greedy, and not ended by the model."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        _, answer = await self.begin(tokens, sampling, kv)
        async with asyncio.timeout(DEADLINE_S):
            await answer.ended.wait()
        assert answer.last.finish is FinishReason.LENGTH, answer.last
        return answer

    async def prefill(self, tokens: Sequence[int]) -> PrefillResult:
        async with asyncio.timeout(DEADLINE_S):
            return await self.engine.prefill(EngineRequest(self.request_id(), tokens, SamplingParams()))

    async def handle(self, tokens: Sequence[int]) -> Handle:
        """KV held here, as the reader hears of it."""
        held = await self.prefill(tokens)
        return Handle(
            handle_id=held.handle_id,
            instance_id="prefill-1",
            epoch=1,
            address="",
            format=self.info.format,
            tokens=held.tokens,
            engine_params=held.engine_params,
            digests=held.digests,
            received_at=time.monotonic(),
            lease_s=held.lease_s,
        )

    async def nothing_held(self, deadline_s: float = DEADLINE_S) -> None:
        """Waits until no request runs and no block is in use or held."""

        def free() -> bool:
            load = self.engine.load()
            return not (load.kv_used_blocks or load.kv_leases or load.running_requests or load.waiting_requests)

        await eventually(free, deadline_s)


class Engines:
    """Starts what a test asks for, keeps it for the next test, and stops what has been idle longest to make room."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._running: dict[tuple[Role, int], Running] = {}

    async def get(self, role: Role, block_size: int = 32) -> Running:
        key = (role, block_size)
        if (running := self._running.pop(key, None)) is not None and running.engine.failed() is not None:
            await running.engine.stop()
            running = None
        if running is None:
            await self.make_room(1)
            config = VllmConfig(
                model=str(self._model),
                dtype="float32",
                max_model_len=2048,
                block_size=block_size,
                kv_cache_memory_mb=256,
                lease_s=LEASE_S,
            )
            running = await Running(config, role).start()
        self._running[key] = running
        return running

    @asynccontextmanager
    async def use(self, role: Role, block_size: int = 32) -> AsyncIterator[Running]:
        """An engine that knows of nothing, until the block ends."""
        running = await self.get(role, block_size)
        await running.nothing_held()
        assert await running.engine.reset_prefix_cache()
        yield running
        if running.engine.failed() is None:
            await running.engine.inject_fault("")

    async def make_room(self, count: int) -> None:
        while len(self._running) > 2 - count:
            await self._running.pop(next(iter(self._running))).engine.stop()
