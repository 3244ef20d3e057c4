"""Takes one answer through the workers: place, prefill, decode; and what to do when one of them fails.

    place    Router.Schedule; without an answer in time, the decode worker with the fewest of our own answers ("blind")
    prefill  Prefill.Run where the router says so; when it fails, decode computes the prompt itself
    decode   Decode.Submit; the answer comes over the worker's Attach stream

A decode worker that refuses or is lost is left out, and the answer goes on or begins anew elsewhere: `migration`
decides. Where it goes on, its tokens so far are placed, prefilled and submitted as the end of the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import Draining, TokenmillError, Unavailable
from controlplane.telemetry import get_logger
from services.frontend.answer import Answer
from services.frontend.calls import left_s, metadata, result
from services.frontend.decode_streams import DecodeStreams
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics
from services.frontend.migration import Move, next_move
from services.frontend.models import Models
from services.frontend.reports import Reports
from services.frontend.routers import Routers
from services.frontend.sampling import sampling_to_proto
from services.frontend.settings import FrontendSettings
from services.frontend.stage import Stage
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tokenmill.router.v1 import router_pb2

__all__ = ["Dispatcher"]

T = TypeVar("T")

_RELEASE_TIMEOUT_S = 2.0
_MOST_RELEASES, _RELEASES_AT_ONCE = 10_000, 64
"""Past the first bound KV is left to its lease."""


@dataclass(slots=True)
class _Placement:
    """Where one attempt runs."""

    decode: router_pb2.Target
    prefill: router_pb2.Target | None = None
    router: str = ""
    """Address of the router that decided; empty: nobody did."""


@dataclass(slots=True)
class _HeldKv:
    """A handle nobody has read yet, and when it came."""

    handle: common_pb2.KvHandle
    received_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def aged(self) -> common_pb2.KvHandle:
        """With the lease that is left now."""
        passed_ms = round((asyncio.get_running_loop().time() - self.received_at) * 1000)
        self.handle.remaining_lease_ms = max(self.handle.remaining_lease_ms - passed_ms, 0)
        return self.handle


class Dispatcher:
    """Runs answers, any number at once. `maintain` owns the work that outlives a request."""

    def __init__(
        self,
        settings: FrontendSettings,
        discovery: Discovery,
        seed: int,
        channels: Channels,
        models: Models,
        streams: DecodeStreams,
        reports: Reports,
        metrics: FrontendMetrics,
    ) -> None:
        self._settings = settings
        self._routers = Routers(settings, discovery, seed, channels, reports)
        self._channels = channels
        self._models = models
        self._streams = streams
        self._reports = reports
        self._metrics = metrics
        self._to_release: asyncio.Queue[tuple[str, prefill_pb2.ReleaseRequest]] = asyncio.Queue(_MOST_RELEASES)
        """With the prefill worker's address."""
        self._log = get_logger(__name__)

    async def run(self, answer: Answer) -> None:
        """Returns when the answer is complete. Raises what ended it; cancelling it cancels the work on every worker."""
        self._metrics.prompt_tokens.inc(len(answer.generation.prompt))
        excluded: list[str] = []
        attempts = 0
        refusal: TokenmillError | None = None
        while True:
            answer.stage = Stage.QUEUED
            try:
                placement = await self._place(answer, excluded)
            except Unavailable as error:
                # Nobody is left: what the last one tried said is the better answer.
                raise refusal or error from None
            try:
                await self._attempt(answer, placement)
            except TokenmillError as error:
                answer.fail(error)
                if answer.ended.exception() is None:
                    return  # all of it had come before
                excluded.append(placement.decode.instance_id)
                attempts += not isinstance(error, Draining)  # says nothing of the request; each instance drains once
                self._move(answer, error, left=placement.decode.instance_id, attempts=attempts)
                refusal = error
            else:
                return

    async def maintain(self) -> None:
        """Gives back KV that nobody will read, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(_RELEASES_AT_ONCE):
                tasks.create_task(self._release_on(), name=f"KV releases {number}")

    def _move(self, answer: Answer, error: TokenmillError, *, left: str, attempts: int) -> None:
        """Makes the answer ready for another worker. Raises the error that it ends with where there may be none."""
        move = next_move(
            error,
            answer.generation.sampling,
            tries_left=self._settings.max_attempts - attempts,
            emitted=answer.emitted,
            sent=answer.sent,
            migration=self._settings.migration,
        )
        self._log.warning(
            f"answer {move.value} on another worker",
            request_id=answer.request_id,
            left=left,
            emitted=answer.emitted,
            reason=error.message,
        )
        if move is Move.RESUME:
            self._metrics.migrations.labels(error.code).inc()
            answer.resume()
        else:
            self._metrics.retries.labels(error.code).inc()
            answer.restart()

    async def _attempt(self, answer: Answer, placement: _Placement) -> None:
        answer.stage = Stage.PLACED
        answer.on_first_token = lambda: self._report_first_token(answer, placement)
        try:
            kv = await self._prefill(answer, placement)
            await self._decode(answer, placement.decode.address, kv)
        finally:
            self._report_end(answer, placement)

    async def _decode(self, answer: Answer, address: str, kv: _HeldKv | None) -> None:
        """Submits, and waits for the end of the answer. KV that may not have been read is given back."""
        finished = False
        try:
            stream = await self._streams.get(address)
            slot = stream.add(answer)
            try:
                request = self._submission(answer, stream.attach_id, slot, kv)
                generation = answer.generation
                answer.stage = Stage.PREFILLING if kv is None else Stage.TRANSFERRING
                call = stream.stub.Submit(request, timeout=left_s(generation), metadata=metadata(generation))
                await _accepted(call, answer)
                await asyncio.shield(answer.ended)
                finished = True
            finally:
                # A worker that only may have heard of the request is told to cancel it too.
                stream.forget(slot, cancel=not finished)
        finally:
            # A worker that is lost cannot give it back itself. KV that was read is gone already, and this does nothing.
            if kv is not None and not finished:
                release = prefill_pb2.ReleaseRequest(handle_id=kv.handle.handle_id, epoch=kv.handle.epoch)
                self._give_back(kv.handle.address, release)

    @staticmethod
    def _submission(answer: Answer, attach_id: str, slot: int, kv: _HeldKv | None) -> decode_pb2.SubmitRequest:
        generation = answer.generation
        return decode_pb2.SubmitRequest(
            request_id=answer.request_id,
            model=generation.model.name,
            attach_id=attach_id,
            slot=slot,
            prompt_token_ids=generation.prompt,
            sampling=sampling_to_proto(generation.sampling),
            kv=kv.aged() if kv is not None else None,
            timeout_ms=max(round(left_s(generation) * 1000), 1),
            priority=generation.routing.priority,
        )

    async def _place(self, answer: Answer, excluded: list[str]) -> _Placement:
        asked = await self._routers.schedule(answer.generation, answer.request_id, excluded)
        if asked is None:
            return self._place_blind(answer.generation, excluded)
        router, placed = asked
        return _Placement(placed.decode, placed.prefill if placed.HasField("prefill") else None, router)

    def _place_blind(self, generation: Generation, excluded: list[str]) -> _Placement:
        self._metrics.blind.inc()
        routing = generation.routing
        candidates = [
            one
            for one in self._models.workers(generation.model.name)
            if one.instance_id not in excluded and routing.allows(one.instance_id, one.labels)
        ]
        if not candidates or routing.session_hard:  # only a router knows where the session is
            raise Unavailable(
                f"no worker can serve the model {generation.model.name!r} now; try again later", retry_after_s=1.0
            )
        chosen = min(candidates, key=lambda one: self._streams.load(one.address))
        return _Placement(router_pb2.Target(instance_id=chosen.instance_id, epoch=chosen.epoch, address=chosen.address))

    async def _prefill(self, answer: Answer, placement: _Placement) -> _HeldKv | None:
        """None: decode computes the prompt, as planned or because the prefill worker failed."""
        generation = answer.generation
        if placement.prefill is None:
            return None
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(placement.prefill.address))
        request = prefill_pb2.RunRequest(
            request_id=answer.request_id,
            model=generation.model.name,
            prompt_token_ids=generation.prompt,
            sampling=sampling_to_proto(generation.sampling),
            priority=generation.routing.priority,
        )
        # A worker that hangs leaves decode the time to compute the prompt itself.
        timeout = min(self._settings.prefill_timeout_s, left_s(generation) / 2)
        answer.stage = Stage.PREFILLING
        done: prefill_pb2.RunResponse | None = None
        try:
            done = await result(stub.Run(request, timeout=timeout, metadata=metadata(generation)))
        except TokenmillError as error:
            self._metrics.prefill_fallbacks.labels(error.code).inc()
            self._log.warning(
                "remote prefill failed; decode computes the prompt",
                request_id=answer.request_id,
                prefill=placement.prefill.instance_id,
                reason=error.message,
            )
            answer.stage = Stage.PLACED
            return None
        finally:
            if done is None:
                # Its answer may have been on its way when it was given up.
                release = prefill_pb2.ReleaseRequest(request_id=answer.request_id, epoch=placement.prefill.epoch)
                self._give_back(placement.prefill.address, release)
        outcome = router_pb2.PrefillDone(cached_tokens=done.cached_tokens, elapsed_ms=done.elapsed_ms)
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, prefill_done=outcome))
        answer.stage = Stage.PREFILLED
        return _HeldKv(done.handle)

    def _report_first_token(self, answer: Answer, placement: _Placement) -> None:
        first = router_pb2.FirstToken(ttft_ms=round((answer.ttft_s or 0) * 1000))
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, first_token=first))

    def _report_end(self, answer: Answer, placement: _Placement) -> None:
        made = answer.completion_tokens - answer.carried
        freed = router_pb2.Freed(cached_tokens=answer.usage.cached_tokens, completion_tokens=made)
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, freed=freed))

    def _give_back(self, address: str, request: prefill_pb2.ReleaseRequest) -> None:
        with suppress(asyncio.QueueFull):
            self._to_release.put_nowait((address, request))

    async def _release_on(self) -> None:
        while True:
            await self._release(*await self._to_release.get())

    async def _release(self, address: str, request: prefill_pb2.ReleaseRequest) -> None:
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(address))
        try:
            await stub.Release(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._log.info("KV was not given back; its lease will end", prefill=address, reason=error.code().name)


async def _accepted(call: Awaitable[decode_pb2.SubmitResponse], answer: Answer) -> None:
    """Waits until the worker has taken the request, or the answer has come to its end meanwhile.

    It ends before that when it is very short, and when the worker has gone silent and its stream was given up. Raises
    the worker's refusal.
    """
    submit = asyncio.create_task(result(call), name=f"submit {answer.request_id}")
    try:
        both: set[asyncio.Future[Any]] = {submit, answer.ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if submit.done():
            await submit
    finally:
        submit.cancel()
