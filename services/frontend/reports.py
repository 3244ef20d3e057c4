"""Tells routers what came of their placements, gathered into few calls."""

from __future__ import annotations

import asyncio

import grpc

from controlplane.channels import Channels
from controlplane.telemetry import get_logger
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["Reports"]

_GATHER_S = 0.05
_TIMEOUT_S = 2.0
_MOST_WAITING = 10_000
"""A router that cannot be reached for so long forgets these placements by itself, from its workers' load reports."""


class Reports:
    """Outcomes wait here for at most 50 ms. What cannot be delivered is dropped: routers correct themselves."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._waiting: dict[str, list[router_pb2.Outcome]] = {}
        self._some = asyncio.Event()
        self._log = get_logger(__name__)

    def add(self, router: str, outcome: router_pb2.Outcome) -> None:
        """For the router at this address; empty: nobody placed the request, nobody needs to know."""
        if not router:
            return
        waiting = self._waiting.setdefault(router, [])
        if len(waiting) < _MOST_WAITING:
            waiting.append(outcome)
        self._some.set()

    async def run(self) -> None:
        """Sends, until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            self._some.clear()
            await self.flush()

    async def flush(self) -> None:
        """Sends what waits now."""
        waiting, self._waiting = self._waiting, {}
        async with asyncio.TaskGroup() as tasks:
            for router, outcomes in waiting.items():
                tasks.create_task(self._send(router, outcomes))

    async def _send(self, router: str, outcomes: list[router_pb2.Outcome]) -> None:
        stub = router_pb2_grpc.RouterStub(self._channels.get(router))
        try:
            await stub.Report(router_pb2.ReportRequest(outcomes=outcomes), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._log.info(
                "router did not take a report", router=router, outcomes=len(outcomes), reason=error.code().name
            )
