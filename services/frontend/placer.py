"""Finds the workers for one attempt of an answer.

A router decides; without one, the worker with the fewest of our own answers does it ("blind"). Workers that have failed
the answer are left out, those whose circuit breaker is open are used only where nobody else can serve. Where nobody can
for a moment, as after a crash or during a restart, the answer waits until the model has been without a worker for
`replacement_wait_s`; one that comes later is refused at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from controlplane.discovery import Discovery
from controlplane.errors import Overloaded, TokenmillError, Unavailable
from controlplane.instances import Instance, State
from services.frontend.answer import Answer
from services.frontend.breaker import Breakers
from services.frontend.decode_streams import DecodeStreams
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models
from services.frontend.routers import Routers
from services.frontend.tried import Seen, Tried, may_be_replaced
from tokenmill.router.v1 import router_pb2

__all__ = ["Placement", "Placer"]

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Placement:
    """Where one attempt runs."""

    decode: router_pb2.Target
    prefill: router_pb2.Target | None = None
    router: str = ""
    """Address of the router that decided; empty: nobody did."""
    stream: str = ""
    """The stream the answer came by, once it is known."""


class Placer:
    """Chooses; what comes of it others tell to `breakers`."""

    def __init__(
        self,
        discovery: Discovery,
        models: Models,
        streams: DecodeStreams,
        routers: Routers,
        breakers: Breakers,
        metrics: FrontendMetrics,
        *,
        replacement_wait_s: float,
    ) -> None:
        self._discovery = discovery
        self._models = models
        self._streams = streams
        self._routers = routers
        self._breakers = breakers
        self._metrics = metrics
        self._wait_s = replacement_wait_s

    async def place(self, answer: Answer, tried: Tried, refusal: TokenmillError | None) -> Placement:
        """Raises what a router refused the answer with, or `refusal`, the last worker's, when nobody else can serve."""
        await self._until_someone_can(answer.generation.model.name, tried, refusal)
        try:
            # One that was let in and lost its worker waits anew; one that was never let in has waited already.
            waited_s = answer.age_s if isinstance(refusal, Overloaded) and not answer.emitted else 0.0
            return await self._place(answer, tried, waited_s)
        except Unavailable as error:
            # What the last one tried said is the better answer.
            raise refusal or error from None

    async def _until_someone_can(self, model: str, tried: Tried, refusal: TokenmillError | None) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = 0.0
        while not self._someone_can(model, tried):
            if not may_be_replaced(refusal):
                raise refusal or _nobody(model)
            since = self._models.unserved_since(model)
            give_up_at = give_up_at or (loop.time() if since is None else since) + self._wait_s
            if not await self._models.change(give_up_at - loop.time()):
                raise refusal or _nobody(model)

    def _someone_can(self, model: str, tried: Tried) -> bool:
        if not tried and self._models.unserved_since(model) is None:
            return True  # what nearly every request finds, without a look at each of a thousand workers
        return bool(self._models.workers(model, lambda one: not tried.excludes(one.instance_id, self._seen(one))))

    async def _place(self, answer: Answer, tried: Tried, waited_s: float) -> Placement:
        avoided = self._breakers.avoided(asyncio.get_running_loop().time())
        excluded = []
        for instance_id in tried:
            known = self._discovery.instances.get(instance_id)
            if known is None or tried.excludes(instance_id, self._seen(known)):
                excluded.append(instance_id)
            elif tried.is_second_choice(instance_id, self._seen(known)):
                avoided.append(instance_id)
        asked = await self._routers.schedule(answer.generation, answer.request_id, excluded, avoided, waited_s)
        if asked is not None and self._is_present(asked[1].decode):
            router, placed = asked
            return Placement(placed.decode, placed.prefill if placed.HasField("prefill") else None, router)
        if asked is not None:
            self._routers.forget(asked[0], answer.request_id)
        return self._place_blind(answer.generation, excluded, avoided)

    def _place_blind(self, generation: Generation, excluded: list[str], avoided: list[str]) -> Placement:
        self._metrics.blind.inc()
        routing = generation.routing
        candidates = self._models.workers(
            generation.model.name,
            lambda one: one.instance_id not in excluded and routing.allows(one.instance_id, one.labels),
        )
        if not candidates or routing.session_hard:  # only a router knows where the session is
            raise _nobody(generation.model.name)
        chosen = min(candidates, key=lambda one: (one.instance_id in avoided, self._streams.load(one.address)))
        return Placement(router_pb2.Target(instance_id=chosen.instance_id, epoch=chosen.epoch, address=chosen.address))

    def _is_present(self, target: router_pb2.Target) -> bool:
        """False: the router does not know yet that this instance has begun a new life."""
        known = self._discovery.instances.get(target.instance_id)
        return known is None or not 0 < target.epoch < known.epoch

    def _seen(self, one: Instance) -> Seen:
        return Seen(one.epoch, self._streams.stream_id(one.address), one.state is State.READY)


def _nobody(model: str) -> Unavailable:
    return Unavailable(f"no worker can serve the model {model!r} now; try again later", retry_after_s=_RETRY_AFTER_S)
