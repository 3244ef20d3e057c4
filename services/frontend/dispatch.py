"""Takes one answer through the workers: place, prefill, decode; and what to do when one of them fails.

    place    `placer`: a router's choice, or a blind one
    prefill  `prefiller`, where the router says so; when it fails, decode computes the prompt itself
    decode   Decode.Submit; the answer comes over the worker's Attach stream

A decode worker that refuses, is lost or gets stuck is left out, and the answer goes on or begins anew elsewhere:
`migration` decides. Where it goes on, its tokens so far are placed, prefilled and submitted as the end of the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import Draining, Overloaded, TokenmillError, Unavailable
from controlplane.telemetry import get_logger
from services.frontend.answer import Answer
from services.frontend.breaker import Breakers, BreakerState, Outcome, outcome_of
from services.frontend.calls import left_s, metadata, result
from services.frontend.decode_streams import DecodeStreams
from services.frontend.metrics import FrontendMetrics
from services.frontend.migration import Move, next_move
from services.frontend.models import Models
from services.frontend.placer import Placement, Placer
from services.frontend.prefiller import HeldKv, Prefiller
from services.frontend.reports import Reports
from services.frontend.routers import Routers
from services.frontend.sampling import sampling_to_proto
from services.frontend.settings import FrontendSettings
from services.frontend.stage import Stage
from services.frontend.tried import Tried
from tokenmill.decode.v1 import decode_pb2
from tokenmill.router.v1 import router_pb2

__all__ = ["Dispatcher"]

_ACCEPT_S = 10.0
"""Longest wait for a worker to take a request while its stream lives."""
_CROWDED_S = 0.5
"""Pause before an answer in the making is offered again to those that had no room for it."""


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
        *,
        frontend_id: str,
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._streams = streams
        self._reports = reports
        self._metrics = metrics
        self._log = get_logger(__name__)
        self._breakers = Breakers(
            lambda instance_id, state: self._log.warning("circuit breaker", instance=instance_id, state=state.value)
        )
        for state in BreakerState:
            metrics.breakers.labels(state.value).set_function(partial(self._breakers.count, state))
        routers = Routers(settings, discovery, seed, channels, reports, frontend_id=frontend_id)
        self._placer = Placer(
            discovery,
            models,
            streams,
            routers,
            self._breakers,
            metrics,
            replacement_wait_s=settings.replacement_wait_s,
        )
        self._prefiller = Prefiller(channels, self._breakers, reports, metrics, timeout_s=settings.prefill_timeout_s)

    async def maintain(self) -> None:
        """Gives back KV that nobody will read, and forgets instances that are gone, until cancelled."""
        forget = self._discovery.subscribe(lambda: self._breakers.keep(self._discovery.instances))
        try:
            await self._prefiller.run()
        finally:
            forget()

    async def run(self, answer: Answer) -> None:
        """Returns when the answer is complete. Raises what ended it; cancelling it cancels the work on every worker."""
        self._metrics.prompt_tokens.inc(len(answer.generation.prompt))
        tried = Tried()
        attempts = 0
        refusal: TokenmillError | None = None
        patient_until = 0.0
        loop = asyncio.get_running_loop()
        while True:
            answer.stage = Stage.QUEUED
            placement: Placement | None = None
            try:
                placement = await self._placer.place(answer, tried, refusal)
                await self._attempt(answer, placement)
                return
            except TokenmillError as error:
                crowded = isinstance(error, Overloaded) and answer.emitted > 0
                if placement is None and not crowded:
                    raise
                answer.fail(error)
                if answer.ended.exception() is None:
                    return  # all of it had come before
                patient_until = patient_until or loop.time() + self._settings.replacement_wait_s
                crowded = crowded and loop.time() < patient_until
                refusal = error
                if placement is not None and not crowded:
                    self._add(tried, placement, error)
                    attempts += not isinstance(error, Draining)  # says nothing of the request
            self._move(answer, refusal, placement, attempts=attempts)
            if crowded:
                # It has been let in once: it is not turned away half done because all others are full for a moment.
                await asyncio.sleep(refusal.retry_after_s or _CROWDED_S)

    def _add(self, tried: Tried, placement: Placement, error: TokenmillError) -> None:
        target = placement.decode
        known = self._discovery.instances.get(target.instance_id)
        epoch = target.epoch or (known.epoch if known is not None else 0)
        tried.add(target.instance_id, epoch, placement.stream, error)

    def _move(self, answer: Answer, error: TokenmillError, placement: Placement | None, *, attempts: int) -> None:
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
            left=placement.decode.instance_id if placement is not None else "",
            emitted=answer.emitted,
            reason=error.message,
        )
        if move is Move.RESUME:
            self._metrics.migrations.labels(error.code).inc()
            answer.resume()
        else:
            self._metrics.retries.labels(error.code).inc()
            answer.restart()

    async def _attempt(self, answer: Answer, placement: Placement) -> None:
        answer.stage = Stage.PLACED
        answer.on_first_token = lambda: self._on_first_token(answer, placement)
        loop = asyncio.get_running_loop()
        decode = placement.decode
        self._breakers.began(decode.instance_id, decode.epoch, loop.time())
        outcome = Outcome.NOTHING
        try:
            kv = await self._prefiller.prefill(answer, placement)
            await self._decode(answer, placement, kv)
            outcome = Outcome.GOOD
        except TokenmillError as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._breakers.ended(decode.instance_id, decode.epoch, outcome, loop.time())
            self._report_end(answer, placement)

    async def _decode(self, answer: Answer, placement: Placement, kv: HeldKv | None) -> None:
        """Submits, and waits for the end of the answer. KV that may not have been read is given back."""
        target = placement.decode
        finished = False
        try:
            stream = await self._streams.get(target.address)
            placement.stream = stream.attach_id
            slot = stream.add(answer)
            try:
                request = _submission(answer, stream.attach_id, slot, kv, target.epoch)
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
            # A worker that is lost cannot give it back itself.
            if kv is not None and not finished:
                self._prefiller.give_back(kv, answer.generation)

    def _on_first_token(self, answer: Answer, placement: Placement) -> None:
        decode = placement.decode
        self._breakers.ended(decode.instance_id, decode.epoch, Outcome.GOOD, asyncio.get_running_loop().time())
        first = router_pb2.FirstToken(ttft_ms=round((answer.ttft_s or 0) * 1000))
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, first_token=first))

    def _report_end(self, answer: Answer, placement: Placement) -> None:
        made = answer.completion_tokens - answer.carried
        freed = router_pb2.Freed(cached_tokens=answer.usage.cached_tokens, completion_tokens=made)
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, freed=freed))


def _submission(answer: Answer, attach_id: str, slot: int, kv: HeldKv | None, epoch: int) -> decode_pb2.SubmitRequest:
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
        epoch=epoch,
    )


async def _accepted(call: Awaitable[decode_pb2.SubmitResponse], answer: Answer) -> None:
    """Waits until the worker has taken the request, or the answer has come to its end meanwhile.

    It ends before that when it is very short, and when the worker has gone silent and its stream was given up. Raises
    the worker's refusal, or `Unavailable` when it does not decide.
    """
    submit = asyncio.create_task(result(call), name=f"submit {answer.request_id}")
    try:
        both: set[asyncio.Future[Any]] = {submit, answer.ended}
        done, _ = await asyncio.wait(both, timeout=_ACCEPT_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise Unavailable(f"the decode worker did not take the request in {_ACCEPT_S:g} s")
        if submit.done():
            await submit
    finally:
        submit.cancel()
