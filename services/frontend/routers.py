"""Asks a router where an answer is to run.

Frontends spread what they ask over all routers. A router that says nothing for `schedule_timeout_s` is given up: the
caller chooses blind. One that holds the request back because every worker is full is not: it says so when it is asked,
and the request keeps its place for as long as it has time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import DeadlineExceeded, InvalidRequest, Overloaded, TokenmillError, Unavailable
from controlplane.instances import Instance, State
from controlplane.telemetry import get_logger
from services.frontend.breaker import Breakers, Outcome
from services.frontend.calls import left_s, metadata, result
from services.frontend.generation import Generation
from services.frontend.reports import Reports
from services.frontend.sampling import needed_capabilities
from services.frontend.settings import FrontendSettings
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["Routers"]

_STATES = (State.READY, State.SUSPECT, State.DRAINING)
"""The states in which a router decides, the best first."""
_STILL_WAITING_S = 5.0
"""How often a router is asked whether a request still waits."""
_FINAL = (Overloaded, InvalidRequest, DeadlineExceeded)
"""What a router refuses is refused: another, or none, would do it wrongly or no better."""


class _Silent(Unavailable):
    """It has not answered."""


class Routers:
    """The deployment's routers, as one frontend uses them."""

    def __init__(
        self,
        settings: FrontendSettings,
        discovery: Discovery,
        seed: int,
        channels: Channels,
        reports: Reports,
        *,
        frontend_id: str,
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._seed = seed
        self._channels = channels
        self._reports = reports
        self._frontend_id = frontend_id
        self._turn = 0
        self._log = get_logger(__name__)
        self._breakers = Breakers(
            lambda router, state: self._log.warning("circuit breaker", router=router, state=state.value)
        )

    async def schedule(
        self,
        generation: Generation,
        request_id: str,
        excluded: Sequence[str],
        avoided: Sequence[str],
        waited_s: float = 0.0,
    ) -> tuple[str, router_pb2.ScheduleResponse] | None:
        """The router's address and its word. None: no router answered in time, or none knows a worker.

        `waited_s`: for a turn at a worker that then refused it.
        Raises what a router refused the request with.
        """
        request = self._request(generation, request_id, excluded, avoided, waited_s)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.schedule_timeout_s
        routers = self._in_turn()
        for number, router in enumerate(routers):
            now = loop.time()
            if now >= give_up_at:
                break
            share_s = (give_up_at - now) / (len(routers) - number)  # a stopped one must leave the next one some time
            outcome = Outcome.NOTHING
            self._breakers.began(router.instance_id, router.epoch, now)
            try:
                placed = await self._ask(router.address, request, generation, now + share_s)
                outcome = Outcome.GOOD
                return router.address, placed
            except _FINAL:
                outcome = Outcome.GOOD
                raise
            except TokenmillError as error:
                outcome = Outcome.BROKEN if isinstance(error, _Silent) else Outcome.NOTHING
                self._log.warning("this router does not decide", router=router.instance_id, reason=error.message)
            finally:
                self._breakers.ended(router.instance_id, router.epoch, outcome, loop.time())
        return None

    def forget(self, router: str, request_id: str) -> None:
        """The router at this address may have placed the request: nothing will come of that."""
        self._reports.add(router, router_pb2.Outcome(request_id=request_id, freed=router_pb2.Freed()))

    def _in_turn(self) -> list[Instance]:
        """The best first; equals take turns. Those that said nothing of late are left out: better blind than late."""
        routers = self._discovery.by_service("router")
        self._breakers.keep({one.instance_id for one in routers})
        silent = self._breakers.avoided(asyncio.get_running_loop().time())
        self._turn += 1
        in_turn: list[Instance] = []
        for state in _STATES:
            equals = [one for one in routers if one.state is state and one.instance_id not in silent]
            equals.sort(key=lambda one: one.instance_id)
            in_turn += [equals[(at + self._turn) % len(equals)] for at in range(len(equals))]
        return in_turn

    def _request(
        self,
        generation: Generation,
        request_id: str,
        excluded: Sequence[str],
        avoided: Sequence[str],
        waited_s: float,
    ) -> router_pb2.ScheduleRequest:
        routing = generation.routing
        return router_pb2.ScheduleRequest(
            request_id=request_id,
            model=generation.model.name,
            block_hashes=generation.block_hashes(self._seed),
            prompt_tokens=len(generation.prompt),
            max_tokens=generation.sampling.max_tokens or 0,
            excluded_instances=excluded,
            avoided_instances=avoided,
            frontend_id=self._frontend_id,
            priority=routing.priority,
            tenant=routing.tenant,
            labels=routing.labels,
            capabilities=needed_capabilities(generation.sampling, routing.priority),
            session_id=routing.session_id,
            session_hard=routing.session_hard,
            pinned_instance=routing.worker,
            timeout_ms=max(round(left_s(generation) * 1000), 1),
            waited_ms=round(waited_s * 1000),
        )

    async def _ask(
        self, router: str, request: router_pb2.ScheduleRequest, generation: Generation, give_up_at: float
    ) -> router_pb2.ScheduleResponse:
        stub = router_pb2_grpc.RouterStub(self._channels.get(router))
        call = stub.Schedule(request, timeout=left_s(generation), metadata=metadata(generation))
        answer = asyncio.ensure_future(result(call))
        told = False
        try:
            placed = await self._held(answer, stub, request.request_id, give_up_at)
            told = True
            return placed
        finally:
            answer.cancel()
            if not told:
                self.forget(router, request.request_id)

    async def _held(
        self,
        answer: asyncio.Future[router_pb2.ScheduleResponse],
        stub: router_pb2_grpc.RouterStub,
        request_id: str,
        give_up_at: float,
    ) -> router_pb2.ScheduleResponse:
        """The answer, however long it takes while the router says that the request waits. Raises `Unavailable`."""
        loop = asyncio.get_running_loop()
        ask_again_s = (give_up_at - loop.time()) / 2
        while not await _done(answer, ask_again_s):
            asked_s = max(give_up_at - loop.time(), 0.001)
            waits = await _waits(stub, request_id, asked_s)
            if not waits and not await _done(answer, give_up_at - loop.time()):
                raise _Silent(f"the router said nothing for {self._settings.schedule_timeout_s:g} s")
            ask_again_s = _STILL_WAITING_S
            give_up_at = loop.time() + ask_again_s + self._settings.schedule_timeout_s
        return answer.result()


async def _done(answer: asyncio.Future[router_pb2.ScheduleResponse], timeout_s: float) -> bool:
    await asyncio.wait({answer}, timeout=max(timeout_s, 0.0))
    return answer.done()


async def _waits(stub: router_pb2_grpc.RouterStub, request_id: str, timeout_s: float) -> bool:
    try:
        asked = await result(stub.IsWaiting(router_pb2.IsWaitingRequest(request_id=request_id), timeout=timeout_s))
    except TokenmillError:
        return False
    return asked.waiting
