"""An engine that does what a test tells it to, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.base import (
    Capability,
    EngineInfo,
    EngineRequest,
    FinishReason,
    KvEventSink,
    KvOutcome,
    LoadSnapshot,
    PrefillResult,
    StepOutput,
    StepSink,
    TokenLogprob,
    Usage,
)
from kvcache.format import KvFormat

FORMAT = KvFormat("weights", "float32", 16, "flat", "scripted", "1", "tp1-pp1")
INFO = EngineInfo(
    model="scripted",
    tokenizer="builtin",
    format=FORMAT,
    total_blocks=1024,
    max_num_seqs=8,
    max_batched_tokens=2048,
    max_model_len=4096,
    vocab_size=32_000,
    capabilities=frozenset(Capability),
)


@dataclass
class ScriptedEngine:
    """Implements `engines.base.Engine`; nothing happens but by `step` and `finish`."""

    info: EngineInfo = INFO
    silent_aborts: bool = False
    """Aborts are taken and their end never comes: a hung engine."""
    refusal: Exception | None = None
    requests: dict[str, tuple[EngineRequest, StepSink]] = field(default_factory=dict)
    admitting: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    prefilling: list[str] = field(default_factory=list)
    prefills_may_end: asyncio.Event = field(default_factory=asyncio.Event)
    admissions_may_end: asyncio.Event = field(default_factory=asyncio.Event)
    steps: int = 0

    def __post_init__(self) -> None:
        self.prefills_may_end.set()
        self.admissions_may_end.set()

    async def start(self, on_kv_events: KvEventSink, on_progress: Callable[[str], None]) -> EngineInfo:
        return self.info

    async def stop(self) -> None:
        pass

    async def generate(self, request: EngineRequest, sink: StepSink) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.admitting.append(request.request_id)
        try:
            await self.admissions_may_end.wait()
        finally:
            self.admitting.remove(request.request_id)
        self.requests[request.request_id] = request, sink

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        if self.refusal is not None:
            raise self.refusal
        self.prefilling.append(request.request_id)
        try:
            await self.prefills_may_end.wait()
        finally:
            self.prefilling.remove(request.request_id)
        handle_id = f"handle-{request.request_id}"
        self.held.add(handle_id)
        return PrefillResult(handle_id, len(request.prompt_token_ids), 0, b"where", (b"digest",), lease_s=120.0)

    def abort(self, request_id: str) -> bool:
        if request_id not in self.requests:
            return False
        self.aborted.append(request_id)
        if not self.silent_aborts:
            self.finish(request_id, FinishReason.CANCELLED)
        return True

    async def release(self, handle_id: str) -> bool:
        if handle_id not in self.held:
            return False
        self.held.remove(handle_id)
        return True

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(running_requests=len(self.requests), steps=self.steps, kv_leases=len(self.held))

    async def reset_prefix_cache(self) -> bool:
        return True

    def failed(self) -> str | None:
        return None

    def step(
        self,
        tokens: Mapping[str, Sequence[int]],
        logprobs: Mapping[str, Sequence[Sequence[TokenLogprob]]] | None = None,
    ) -> None:
        """One engine step: new tokens by request id."""
        self.steps += 1
        outputs: dict[StepSink, list[StepOutput]] = {}
        for request_id, token_ids in tokens.items():
            if request_id in self.requests:
                output = StepOutput(request_id, token_ids, logprobs=(logprobs or {}).get(request_id))
                outputs.setdefault(self.requests[request_id][1], []).append(output)
        for sink, batch in outputs.items():
            sink(batch)

    def finish(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.STOP,
        *,
        token_ids: Sequence[int] = (),
        usage: Usage | None = None,
        kv_outcome: KvOutcome = KvOutcome.NONE,
    ) -> None:
        """The engine's end of one request."""
        request, sink = self.requests.pop(request_id)
        usage = usage or Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=0)
        sink([StepOutput(request_id, token_ids, reason, usage, kv_outcome=kv_outcome)])

    def lacking(self, *capabilities: Capability) -> ScriptedEngine:
        """The same without some capabilities."""
        return replace(self, info=replace(self.info, capabilities=self.info.capabilities - set(capabilities)))
