"""Asks a router where an answer is to run.

Frontends spread what they ask over all routers. A router that says nothing for `schedule_timeout_s` is given up: the
caller chooses blind. One that holds the request back because every worker is full is not: it says so when it is asked,
and the request keeps its place for as long as it has time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import DeadlineExceeded, InvalidRequest, Overloaded, TokenmillError, Unavailable
from controlplane.instances import State
from controlplane.telemetry import get_logger
from services.frontend.calls import left_s, metadata, result
from services.frontend.generation import Generation
from services.frontend.reports import Reports
from services.frontend.settings import FrontendSettings
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["Routers"]

_STATES = (State.READY, State.SUSPECT, State.DRAINING)
"""The states in which a router decides, the best first."""
_STILL_WAITING_S = 5.0
"""How often a router is asked whether a request still waits."""
_FINAL = (Overloaded, InvalidRequest, DeadlineExceeded)
"""What a router refuses is refused: another, or none, would do it wrongly or no better."""


class Routers:
    """The deployment's routers, as one frontend uses them."""

    def __init__(
        self, settings: FrontendSettings, discovery: Discovery, seed: int, channels: Channels, reports: Reports
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._seed = seed
        self._channels = channels
        self._reports = reports
        self._turn = 0
        self._log = get_logger(__name__)

    async def schedule(
        self, generation: Generation, request_id: str, excluded: Sequence[str]
    ) -> tuple[str, router_pb2.ScheduleResponse] | None:
        """The router's address and its word. None: no router answered in time, or none knows a worker.

        Raises what a router refused the request with.
        """
        request = _request(generation, request_id, self._seed, excluded)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.schedule_timeout_s
        for router in self._in_turn():
            try:
                return router, await self._ask(router, request, generation, give_up_at)
            except _FINAL:
                raise
            except TokenmillError as error:
                self._log.warning("this router does not decide", router=router, reason=error.message)
            if loop.time() >= give_up_at:
                break
        return None

    def _in_turn(self) -> Iterator[str]:
        """Addresses, the best first; equals take turns."""
        routers = [one for one in self._discovery.by_service("router") if one.state in _STATES]
        self._turn += 1
        for state in _STATES:
            equals = sorted((one.instance_id, one.address) for one in routers if one.state is state)
            for at in range(len(equals)):
                yield equals[(at + self._turn) % len(equals)][1]

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
                # It may have placed the request all the same, and must not wait for its end.
                freed = router_pb2.Outcome(request_id=request.request_id, freed=router_pb2.Freed())
                self._reports.add(router, freed)

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
                raise Unavailable(f"the router said nothing for {self._settings.schedule_timeout_s:g} s")
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


def _request(generation: Generation, request_id: str, seed: int, excluded: Sequence[str]) -> router_pb2.ScheduleRequest:
    routing = generation.routing
    return router_pb2.ScheduleRequest(
        request_id=request_id,
        model=generation.model.name,
        block_hashes=generation.block_hashes(seed),
        prompt_tokens=len(generation.prompt),
        max_tokens=generation.sampling.max_tokens or 0,
        excluded_instances=excluded,
        priority=routing.priority,
        tenant=routing.tenant,
        labels=routing.labels,
        session_id=routing.session_id,
        session_hard=routing.session_hard,
        pinned_instance=routing.worker,
        timeout_ms=max(round(left_s(generation) * 1000), 1),
    )
