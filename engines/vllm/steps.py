"""The way of tokens out of vLLM: one call to the host per engine step, whatever the number of requests.

vLLM hands each request's output to a queue object of ours, and calls `record` once when a step is through. No task,
no event and no asyncio queue per request or token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from vllm.outputs import RequestOutput
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from controlplane.errors import Cancelled, EngineFailed
from engines.base import (
    EngineRequest,
    Failure,
    FinishReason,
    KvOutcome,
    StepOutput,
    StepSink,
    TokenLogprob,
    Usage,
)

__all__ = ["HeldPrefill", "RunningRequest", "StepRecorder"]

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
}

_SMOOTHING = 0.1
"""Weight of the newest step in the mean step time."""


class StepRecorder(StatLoggerBase):  # type: ignore[misc]
    """Collects what a step gave, hands it over when vLLM reports the step, and keeps its numbers."""

    def __init__(
        self,
        on_handoff: Callable[[str, KvOutcome, int], None],
        on_overdue: Callable[[str], None],
        on_lease_end: Callable[[str, bool], None],
    ) -> None:
        self.steps = 0
        self.step_time_s = 0.0
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self._pending: dict[StepSink, list[StepOutput]] = {}
        self._on_handoff = on_handoff
        self._on_overdue = on_overdue
        self._on_lease_end = on_lease_end

    def add(self, sink: StepSink, output: StepOutput) -> None:
        """Keeps an output for the end of this step."""
        self._pending.setdefault(sink, []).append(output)

    def flush(self) -> None:
        """Gives each sink all that has come for it."""
        pending, self._pending = self._pending, {}
        for sink, outputs in pending.items():
            sink(outputs)

    def flush_soon(self) -> None:
        """For what comes outside of a step."""
        asyncio.get_running_loop().call_soon(self.flush)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after each step of the engine, once its outputs are in their queues."""
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
            if (details := scheduler_stats.iteration_details) is not None:
                self.steps += 1
                took = details.elapsed_ms / 1000
                self.step_time_s += (took - self.step_time_s) * (_SMOOTHING if self.steps > 1 else 1.0)
            if transfers := scheduler_stats.kv_connector_stats:
                for request_id, outcome, blocks in transfers["handoffs"]:
                    self._on_handoff(request_id, KvOutcome(outcome), blocks)
                for request_id in transfers["overdue"]:
                    self._on_overdue(request_id)
                for request_id, expired in transfers["leases_ended"]:
                    self._on_lease_end(request_id, expired)
        self.flush()

    def log_engine_initialized(self) -> None:
        """Nothing to say: the host logs what it serves."""


class RunningRequest:
    """One request inside vLLM, and the queue that vLLM puts its outputs into."""

    def __init__(
        self,
        request: EngineRequest,
        sink: StepSink,
        recorder: StepRecorder,
        on_end: Callable[[RunningRequest], None],
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.internal_id = _internal_id()
        self.kv_outcome = KvOutcome.NONE
        self._prompt_tokens = len(request.prompt_token_ids)
        self._completion_tokens = 0
        self._remote_tokens = 0
        self._cached_tokens: int | None = None
        """Set when a hand-off says how much of the prompt was here already; vLLM adds up both."""
        self._logprobs = request.sampling.logprobs
        self._sink = sink
        self._recorder = recorder
        self._on_end = on_end

    def handed_off(self, outcome: KvOutcome, blocks: int, block_size: int) -> None:
        """One of the engine's workers has read `blocks` blocks, or failed to. One failure counts for all."""
        if self.kv_outcome not in (KvOutcome.LOCAL, KvOutcome.READ):
            return
        self.kv_outcome = outcome
        self._cached_tokens, self._remote_tokens = None, 0
        if outcome is KvOutcome.READ:
            self._cached_tokens = (math.ceil(self._prompt_tokens / block_size) - blocks) * block_size
            self._remote_tokens = self._prompt_tokens - self._cached_tokens

    def begin_again(self) -> str:
        """The read takes too long: the prompt is computed here, as another request to vLLM. Returns the former's id."""
        former, self.internal_id = self.internal_id, _internal_id()
        self.kv_outcome = KvOutcome.UNREACHABLE
        return former

    def put(self, output: RequestOutput | Exception) -> None:
        """Called by vLLM, within a step or (aborts, a dead engine) outside of one."""
        if isinstance(output, Exception):
            self._end(StepOutput(self.request_id, (), FinishReason.ERROR), 0, f"the engine stopped: {output}")
            self._recorder.flush_soon()
            return
        if output.request_id != self.internal_id:
            return  # the end of what was begun again
        completion = output.outputs[0]
        self._completion_tokens += len(completion.token_ids)
        step = StepOutput(self.request_id, completion.token_ids)
        if self._logprobs is not None and completion.logprobs:
            step.logprobs = [
                _best(position, token_id, self._logprobs)
                for position, token_id in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
        if completion.finish_reason is None:
            self._recorder.add(self._sink, step)
            return
        step.finish = _FINISH[completion.finish_reason]
        self._end(step, output.num_cached_tokens or 0, "vLLM gave up on the request")

    def _end(self, step: StepOutput, cached_tokens: int, failure: str) -> None:
        step.usage = Usage(
            self._prompt_tokens,
            self._completion_tokens,
            cached_tokens if self._cached_tokens is None else self._cached_tokens,
            self._remote_tokens,
        )
        step.kv_outcome = self.kv_outcome
        if step.finish is FinishReason.ERROR:
            step.failure = Failure("engine_failed", failure)
        self._recorder.add(self._sink, step)
        self._on_end(self)


class HeldPrefill:
    """A prompt that vLLM computes for a reader, and the queue that it puts the one output into."""

    def __init__(
        self,
        request: EngineRequest,
        on_held: Callable[[HeldPrefill, int], None],
        on_end: Callable[[HeldPrefill], None],
    ) -> None:
        self.request_id = request.request_id
        self.internal_id = _internal_id()
        self.cached_tokens = 0
        self.result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """vLLM's parameters for the reader."""
        self._on_held = on_held
        self._on_end = on_end

    def put(self, output: RequestOutput | Exception) -> None:
        """Called by vLLM, once."""
        self._on_end(self)
        if self.result.done():  # the caller has gone
            return
        if isinstance(output, Exception):
            self.result.set_exception(EngineFailed(f"the engine stopped: {output}"))
        elif output.outputs[0].finish_reason == "abort":
            self.result.set_exception(Cancelled("the prefill was aborted"))
        elif not (params := output.kv_transfer_params):
            self.result.set_exception(EngineFailed("vLLM gave up on the prefill"))
        else:
            self.cached_tokens = output.num_cached_tokens or 0
            self._on_held(self, max(map(len, params["remote_block_ids"])))
            self.result.set_result(params)


def _internal_id() -> str:
    """Ours alone: engines send one another notices as text, in which a client's own id could say anything."""
    return uuid4().hex


def _best(position: Any, token_id: int, count: int) -> list[TokenLogprob]:
    """vLLM's dictionary of one position as a list: the chosen token, then the best ones in order."""
    best = sorted((p for p in position.items() if p[1].rank <= count), key=lambda p: p[1].rank)
    return [TokenLogprob(i, entry.logprob) for i, entry in [(token_id, position[token_id]), *best]]
