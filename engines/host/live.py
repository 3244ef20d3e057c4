"""Every request a decode worker is answering, and the streams that their answers leave by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    Stalled,
    TokenmillError,
    Unavailable,
    error_class,
)
from controlplane.telemetry import get_logger
from engines.base import (
    EngineRequest,
    Failure,
    FinishReason,
    Handle,
    KvOutcome,
    StepOutput,
    Usage,
)
from engines.host.admission import handle_verdict
from engines.host.attach import AttachStream
from engines.host.convert import finished_to_proto
from engines.host.outbox import Slot
from engines.host.started import StartedEngine
from engines.host.waits import Waits

__all__ = ["DecodeLimits", "LiveRequests"]

_RETRY_AFTER_S = 1.0
_ENGINE_GRACE_S = 0.1
"""When a request is ended early: how long to wait for the engine's account of it (usage, what became of the KV)."""
_GIVEN_BACK = (KvOutcome.READ, KvOutcome.LOCAL, KvOutcome.CORRUPT)
"""The engine itself has told the holder that it needs the KV no more."""
_MAX_FAILURE_CHARS = 2000
"""An engine's error text is cut here, so that a long trace cannot fill a message."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The bounds of one decode worker; services/decode/settings.py says what each means to a user."""

    max_waiting: int = 256
    max_wait_s: float = 10.0
    max_handle_age_s: float = 10.0
    max_unsent_bytes: int = 256 << 10
    stalled_write_s: float = 30.0


class _Metrics:
    """What a decode worker counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handoffs = Counter(
            "tokenmill_kv_handoffs",
            "Requests by what became of the KV they were handed",
            ["outcome"],
            registry=registry,
        )
        self.requests = Counter("tokenmill_decode_requests", "Answers by how they ended", ["finish"], registry=registry)
        self.tokens = Counter("tokenmill_decode_tokens", "Tokens generated", registry=registry)


class _Live:
    """One request, from its admission until the engine has let go of it."""

    __slots__ = (
        "admitted", "completion_tokens", "ending", "handle", "kv_outcome", "prompt_tokens", "request_id", "slot",
        "stream", "timer", "told",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, stream: AttachStream, slot: Slot) -> None:
        self.request_id = request.request_id
        self.prompt_tokens = len(request.prompt_token_ids)
        self.stream = stream
        self.slot = slot
        self.handle: Handle | None = None
        """Given to the engine to read."""
        self.kv_outcome = KvOutcome.NONE
        """Why a handle was not given to the engine."""
        self.completion_tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        """Ends the request when its time is over; once it is ending, tells so without the engine."""
        self.admitted = False
        """The engine has taken it."""
        self.ending: tuple[FinishReason, TokenmillError | None] | None = None
        """How it ends, where that is decided here. No token is passed on any more."""
        self.told = False
        """The frontend has been told of the end."""

    def usage(self) -> Usage:
        """As far as this worker counted itself."""
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LiveRequests:
    """Owns requests and streams. Only `submit` and `drain` wait; nothing here waits for a frontend to read."""

    def __init__(self, worker: StartedEngine, limits: DecodeLimits) -> None:
        self._engine = worker.engine
        self._info = worker.info
        self._release = worker.release
        self._limits = limits
        self._metrics = _Metrics(worker.registry)
        self._loop = asyncio.get_running_loop()
        self._log = get_logger(__name__)
        self._live: dict[str, _Live] = {}
        self._streams: dict[str, AttachStream] = {}
        self._waits = Waits(limits.max_wait_s)
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._halted = ""
        """Why no request is taken for now."""
        self._sink = self._on_step
        """One object for all requests, so that an engine calls it once a step."""

    def attach(self, attach_id: str, min_flush_s: float) -> AttachStream:
        """Opens a stream. Raises `InvalidRequest` when its id is taken."""
        if attach_id in self._streams:
            raise InvalidRequest(f"attach_id {attach_id!r} is attached already: choose another", param="attach_id")
        stream = AttachStream(attach_id, min_flush_s=min_flush_s, stalled_write_s=self._limits.stalled_write_s)
        self._streams[attach_id] = stream
        return stream

    def detach(self, stream: AttachStream) -> None:
        """Forgets a stream that has ended and cancels its requests."""
        del self._streams[stream.attach_id]
        self.cancel([live.request_id for live in self._live.values() if live.stream is stream])

    def stream(self, attach_id: str) -> AttachStream:
        """Raises `Unavailable` for an unknown id: the stream broke, or this worker is not the one it was."""
        stream = self._streams.get(attach_id)
        if stream is None:
            raise Unavailable(
                f"no Attach stream {attach_id!r} is open on this worker: attach again, or try another worker",
                param="attach_id",
            )
        return stream

    async def submit(
        self, request: EngineRequest, stream: AttachStream, slot_number: int, *, timeout_s: float, handle_age_s: float
    ) -> None:
        """Hands a checked request to the engine; its answer goes to `stream`. `timeout_s` 0: no limit.

        A KV handle that is not worth trying is released and the prompt computed here. Raises `Unavailable`,
        `InvalidRequest`, `Overloaded` or what the engine raises; then nothing of the request remains.
        """
        if self._draining:
            raise Draining("this worker is draining: try another")
        if self._halted:
            raise Stalled(self._halted)
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id {request.request_id!r} is being served already", param="request_id")
        if len(self._live) >= self._info.max_num_seqs + self._limits.max_waiting:
            raise Overloaded(
                f"{len(self._live)} requests are running or waiting here, as many as this worker takes",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waits.check(self._loop.time(), self._waiting(), timeout_s or None)
        live = _Live(request, stream, stream.outbox.open(slot_number))
        self._live[request.request_id] = live
        self._idle.clear()
        if timeout_s:
            error = DeadlineExceeded(f"the answer took longer than the {timeout_s:g} s it was given")
            live.timer = self._loop.call_later(timeout_s, self._end, live, FinishReason.ERROR, error)
        try:
            await self._engine.generate(self._with_worthy_handle(live, request, handle_age_s), self._sink)
        except BaseException:
            # Refused, or the caller left while the engine was deciding.
            if not live.told:
                live.told = True
                stream.outbox.close(live.slot)
            self._engine.abort(live.request_id)
            self._remove(live)
            raise
        live.admitted = True
        if live.ending is not None:
            self._abort(live)

    def cancel(self, request_ids: Iterable[str]) -> int:
        """Ends these requests with CANCELLED; returns how many were alive."""
        cancelled = 0
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None and live.ending is None:
                cancelled += 1
                self._end(live, FinishReason.CANCELLED, None)
        return cancelled

    @property
    def busy(self) -> int:
        """Requests that the engine should be working on; one that has KV to read first may be waiting for others."""
        return sum(
            live.ending is None and (live.handle is None or live.completion_tokens > 0) for live in self._live.values()
        )

    def halt(self, reason: str) -> None:
        """Fails every running answer, at once and without the engine, and refuses new ones, until `go_on`."""
        self._halted = reason
        for live in list(self._live.values()):
            self._end(live, FinishReason.ERROR, Stalled(reason))
            if live.ending is not None:
                self._tell_end(live, *live.ending)

    def go_on(self) -> None:
        """Takes requests again."""
        self._halted = ""

    async def drain(self, timeout_s: float) -> None:
        """Takes no new request and waits for the running ones; those that outlast `timeout_s` fail `Draining`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("requests outlasted the drain", requests=len(self._live))
            for live in list(self._live.values()):
                self._end(live, FinishReason.ERROR, Draining("the worker was stopped before the answer was whole"))
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * _ENGINE_GRACE_S):
                    await self._idle.wait()

    def resume(self) -> None:
        """Takes new requests again after a `drain`."""
        self._draining = False

    def __len__(self) -> int:
        """Requests alive."""
        return len(self._live)

    def close(self) -> None:
        """Lets every stream end once it has sent what it has."""
        self._draining = True
        for stream in self._streams.values():
            stream.close()

    def _with_worthy_handle(self, live: _Live, request: EngineRequest, handle_age_s: float) -> EngineRequest:
        handle = request.kv
        if handle is None:
            return request
        verdict = handle_verdict(handle, handle_age_s, self._info, self._limits.max_handle_age_s)
        if verdict is KvOutcome.NONE:
            live.handle = handle
            return request
        if verdict is KvOutcome.INCOMPATIBLE:
            self._log.warning(
                "a prefill worker's KV does not fit this engine",
                prefill=handle.instance_id,
                differences=handle.format.differences(self._info.format),
            )
        live.kv_outcome = verdict
        self._release(handle)
        return replace(request, kv=None)

    def _on_step(self, outputs: Sequence[StepOutput]) -> None:
        """The engine's sink, once a step for all requests."""
        tokens = 0
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            token_ids = output.token_ids
            if token_ids and live.ending is None:
                tokens += len(token_ids)
                unsent_bytes = live.stream.push(
                    live.slot, token_ids, output.logprobs, at_once=not live.completion_tokens
                )
                if not live.completion_tokens:
                    self._waits.begun(self._loop.time(), self._waiting() - 1)
                live.completion_tokens += len(token_ids)
                if unsent_bytes > self._limits.max_unsent_bytes:
                    self._overflow(live, unsent_bytes)
            if output.finish is not None:
                self._engine_ended(live, output, output.finish)
        if tokens:
            self._metrics.tokens.inc(tokens)

    def _waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(not live.completion_tokens for live in self._live.values())

    def _engine_ended(self, live: _Live, output: StepOutput, reason: FinishReason) -> None:
        error = _error(output.failure)
        usage = output.usage or live.usage()
        if live.ending is not None:
            reason, error = live.ending
            usage = replace(usage, completion_tokens=live.completion_tokens)  # what the frontend got
        self._tell_end(live, reason, error, usage, output.kv_outcome)
        self._forget(live, output.kv_outcome)

    def _overflow(self, live: _Live, unsent_bytes: int) -> None:
        live.stream.outbox.drop_unsent(live.slot)
        error = Overloaded(f"{unsent_bytes} bytes of the answer were waiting to be read; this request was given up")
        self._end(live, FinishReason.ERROR, error)

    def _end(self, live: _Live, reason: FinishReason, error: TokenmillError | None) -> None:
        """Ends a request before its engine does, and stops the engine's work on it."""
        if live.ending is None:
            live.ending = reason, error
            live.stop_timer()
            live.timer = self._loop.call_later(_ENGINE_GRACE_S, self._tell_end, live, reason, error)
            # Not at once: this may be running inside the engine's own call of its sink.
            self._loop.call_soon(self._abort, live)

    def _tell_end(
        self,
        live: _Live,
        reason: FinishReason,
        error: TokenmillError | None,
        usage: Usage | None = None,
        outcome: KvOutcome = KvOutcome.NONE,
    ) -> None:
        live.stop_timer()
        if live.told:
            return
        live.told = True
        if live.kv_outcome is not KvOutcome.NONE:
            outcome = live.kv_outcome
        finished = finished_to_proto(live.slot.number, reason, usage or live.usage(), outcome, error)
        live.stream.finish(live.slot, finished)
        self._metrics.requests.labels(reason.name.lower()).inc()
        if error is not None:
            self._log.warning("request failed", request_id=live.request_id, code=error.code, reason=error.message)

    def _abort(self, live: _Live) -> None:
        """Stops the engine's work on a request that is ending; its sink then hears of the end."""
        if not live.admitted or self._live.get(live.request_id) is not live:
            return
        if not self._engine.abort(live.request_id) and live.ending is not None:
            self._tell_end(live, *live.ending)
            self._forget(live, KvOutcome.NONE)

    def _forget(self, live: _Live, outcome: KvOutcome) -> None:
        """The engine has let go of the request; `outcome` is what it says became of the KV."""
        self._remove(live)
        if live.kv_outcome is not KvOutcome.NONE:
            outcome = live.kv_outcome
        elif live.handle is not None and outcome not in _GIVEN_BACK:
            self._release(live.handle)  # whether the engine came so far that the holder knows, is not certain
        self._metrics.handoffs.labels(outcome.name.lower()).inc()

    def _remove(self, live: _Live) -> None:
        live.stop_timer()
        del self._live[live.request_id]
        if not self._live:
            self._idle.set()


def _error(failure: Failure | None) -> TokenmillError | None:
    return error_class(failure.code)(failure.message[:_MAX_FAILURE_CHARS]) if failure is not None else None
