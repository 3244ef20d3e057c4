"""The Prefill gRPC service: computes prompts and hands out leases on their KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import Counter

from controlplane.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    Stalled,
    TokenmillError,
    Unavailable,
)
from controlplane.telemetry import get_logger
from engines.base import EngineInfo, EngineRequest, PrefillResult
from engines.host.admission import check_epoch, check_model, check_prefill
from engines.host.convert import handle_to_proto, sampling_from_proto
from engines.host.started import StartedEngine
from engines.host.waits import Waits
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc

__all__ = ["PrefillLimits", "PrefillService"]

_RETRY_AFTER_S = 1.0
_LEASE_POLL_S = 0.1
"""While draining: how often to ask the engine whether all held KV has been read."""
_CROSSING_S = 10.0
"""How long after an answer its caller may still say that it had given up before the answer came."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """The bounds of one prefill worker; services/prefill/settings.py says what each means to a user."""

    max_waiting: int = 256
    max_wait_s: float = 10.0


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Refuses every call `Unavailable` until `serve`. Knows the running calls; the engine knows the leases."""

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._waits = Waits(limits.max_wait_s)
        self._log = get_logger(__name__)
        self._serving: tuple[StartedEngine, Counter] | None = None
        self._running: dict[str, asyncio.Timeout] = {}
        self._answered: dict[str, tuple[str, float]] = {}
        """Handle and time of the last answers by request, the oldest first."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._halted = ""
        """Why no prompt is taken for now."""
        self._releases: set[asyncio.Task[bool]] = set()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Returns the service's full name."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        return prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

    def serve(self, started: StartedEngine) -> None:
        """Takes calls from now on."""
        counts = Counter(
            "tokenmill_prefill_runs", "Prompts by what came of them", ["result"], registry=started.registry
        )
        self._serving = started, counts

    @property
    def busy(self) -> int:
        """Prompts that the engine should be working on."""
        return len(self._running)

    def halt(self, reason: str) -> None:
        """Fails the running prompts at once and refuses new ones, until `go_on`."""
        self._halted = reason
        self._end_running()

    def go_on(self) -> None:
        """Takes prompts again."""
        self._halted = ""

    def close(self) -> None:
        """Nothing to end: `drain` ended the calls, and the engine frees what it holds."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses new prompts; waits for the running ones, and for held KV to be read, released or expired.

        Prompts that outlast `timeout_s` fail `Draining`.
        """
        self._draining = True
        if self._serving is None:
            return
        engine = self._serving[0].engine
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                while engine.load().kv_leases:  # noqa: ASYNC110  the engine has no event for this
                    await asyncio.sleep(_LEASE_POLL_S)
        except TimeoutError:
            self._log.warning("work outlasted the drain", prompts=len(self._running), kv_leases=engine.load().kv_leases)
            self._end_running()
            await self._idle.wait()

    def _end_running(self) -> None:
        for timeout in self._running.values():
            if not timeout.expired():
                timeout.reschedule(0)

    def resume(self) -> None:
        """Takes new prompts again after a `drain`."""
        self._draining = False

    def unfinished(self) -> int:
        """Prompts running and KV held."""
        held = self._serving[0].engine.load().kv_leases if self._serving is not None else 0
        return len(self._running) + held

    async def Run(  # noqa: N802  this and Release are gRPC's names
        self, request: prefill_pb2.RunRequest, context: Context
    ) -> prefill_pb2.RunResponse:
        """Computes a prompt. Nothing stays held for a caller who has gone or whose time is over."""
        started = time.monotonic()
        worker, results = self._ready()
        check_epoch(request.epoch, worker.epoch)
        with _counted(results):
            result = await self._prefill(worker, _engine_request(request, worker.info), context.time_remaining())
            # Runs when the call is over; one that was cut off before its answer was sent is not done.
            context.add_done_callback(
                lambda ended: None if ended.done() else self._release(result)  # type: ignore[arg-type]  # wrong in stubs
            )
            handle = handle_to_proto(
                result,
                worker.info.format,
                instance_id=worker.instance_id,
                epoch=worker.epoch,
                address=worker.address,
            )
            self._remember(request.request_id, result.handle_id)
            return prefill_pb2.RunResponse(
                handle=handle,
                cached_tokens=result.cached_tokens,
                elapsed_ms=round((time.monotonic() - started) * 1000),
            )

    async def Release(  # noqa: N802
        self, request: prefill_pb2.ReleaseRequest, context: Context
    ) -> prefill_pb2.ReleaseResponse:
        """Frees KV that nobody will read."""
        worker, _ = self._ready()
        if request.epoch != worker.epoch:
            return prefill_pb2.ReleaseResponse(released=False)  # what another epoch held is gone
        handle_id = request.handle_id or self._answered.pop(request.request_id, ("", 0.0))[0]
        return prefill_pb2.ReleaseResponse(released=await worker.engine.release(handle_id))

    async def _prefill(self, worker: StartedEngine, request: EngineRequest, time_left_s: float | None) -> PrefillResult:
        if self._draining:
            raise Draining("this worker is draining: try another")
        if self._halted:
            raise Stalled(self._halted)
        if request.request_id in self._running:
            raise InvalidRequest(f"request_id {request.request_id!r} is being computed already", param="request_id")
        if len(self._running) >= worker.info.max_num_seqs + self._limits.max_waiting:
            raise Overloaded(
                f"{len(self._running)} prompts are running or waiting here, as many as this worker takes",
                retry_after_s=_RETRY_AFTER_S,
            )
        loop = asyncio.get_running_loop()
        self._waits.check(loop.time(), len(self._running), time_left_s)
        try:
            async with asyncio.timeout(time_left_s) as timeout:
                self._running[request.request_id] = timeout
                self._idle.clear()
                try:
                    result = await worker.engine.prefill(request)
                    self._waits.begun(loop.time(), len(self._running) - 1)
                    return result
                finally:
                    del self._running[request.request_id]
                    if not self._running:
                        self._idle.set()
        except TimeoutError:
            if self._halted:
                raise Stalled(self._halted) from None
            if self._draining:
                raise Draining("the worker was stopped before the prompt was computed") from None
            raise DeadlineExceeded("the prompt was not computed in the time the call had") from None

    def _remember(self, request_id: str, handle_id: str) -> None:
        now = time.monotonic()
        self._answered.pop(request_id, None)
        self._answered[request_id] = handle_id, now
        while self._answered[oldest := next(iter(self._answered))][1] < now - _CROSSING_S:
            del self._answered[oldest]

    def _release(self, result: PrefillResult) -> None:
        worker, _ = self._ready()
        task = asyncio.create_task(worker.engine.release(result.handle_id), name="release undelivered KV")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _ready(self) -> tuple[StartedEngine, Counter]:
        if self._serving is None:
            raise Unavailable("this worker is still loading its model: try another")
        return self._serving


@contextmanager
def _counted(results: Counter) -> Iterator[None]:
    """Counts what comes of the prompt inside."""
    result = TokenmillError.code
    try:
        yield
        result = "ok"
    except TokenmillError as error:
        result = error.code
        raise
    except asyncio.CancelledError:
        result = "cancelled"
        raise
    finally:
        results.labels(result).inc()


def _engine_request(request: prefill_pb2.RunRequest, info: EngineInfo) -> EngineRequest:
    """Checked, so that the engine hears only of what it can compute."""
    if not request.request_id:
        raise InvalidRequest("request_id is empty: choose a unique one", param="request_id")
    check_model(request.model, info)
    engine_request = EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling=sampling_from_proto(request.sampling),
        priority=request.priority,
    )
    check_prefill(engine_request, info)
    return engine_request
