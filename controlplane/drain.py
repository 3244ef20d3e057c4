"""Takes an instance out of use, and back: one way for SIGTERM and for `Control.Drain`.

begun      DRAINING is public, and every router that answers in time has confirmed that it places nothing here
run        the service refuses what comes all the same, and finishes what runs; until then it can be taken back
the end    of the process, with exit code 0
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.errors import InvalidRequest
from controlplane.instances import Instance, State
from controlplane.telemetry import Logger
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["Drain", "routers_confirm"]

_LATE_S = 1.0
"""What a service may need beyond its time to end what outlasted it."""
_CONFIRM_S = 1.0
_DECIDING = (State.READY, State.SUSPECT, State.DRAINING)


class Drain:
    """Whether this process is to go, and until when. `ask` and `take_back` may come at any time, in any order."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.begun = asyncio.Event()
        """Set by the host; cleared when the drain was taken back."""
        self.undone = asyncio.Event()
        self.final = False
        """It cannot be taken back."""
        self._changed = asyncio.Event()
        self._deadline = 0.0

    @property
    def left_s(self) -> float:
        """Time until what still runs is ended."""
        return max(self._deadline - asyncio.get_running_loop().time(), 0.0)

    def ask(self, timeout_s: float, *, final: bool = False) -> None:
        """Begins it, or sets its time anew; once it is final, only to less."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        shorter_only = self.asked.is_set() and (final or self.final)
        self._deadline = min(deadline, self._deadline) if shorter_only else deadline
        self.final |= final
        self.undone.clear()
        self.asked.set()
        self._changed.set()

    def take_back(self) -> None:
        """Ends it; harmless when there is none. Raises `InvalidRequest` when it is final."""
        if self.final:
            raise InvalidRequest("this instance is about to end; start another in its place")
        if self.asked.is_set():
            self.asked.clear()
            self._changed.set()

    async def run(self, drain: Callable[[float], Coroutine[Any, Any, None]]) -> bool:
        """Lets `drain` finish, which is told how long it may take, again when that changes. False: it was taken back.

        What takes much longer than it may is cancelled.
        """
        while self.asked.is_set():
            self._changed.clear()
            work = asyncio.create_task(drain(self.left_s), name="drain")
            changed = asyncio.create_task(self._changed.wait(), name="drain changed")
            try:
                ends: tuple[asyncio.Future[Any], ...] = (work, changed)
                await asyncio.wait(ends, timeout=self.left_s + _LATE_S, return_when=asyncio.FIRST_COMPLETED)
                ended = work.done()
                if ended:
                    work.result()
            finally:
                work.cancel()
                changed.cancel()
                await asyncio.gather(work, changed, return_exceptions=True)
            if ended or not self._changed.is_set():
                break
        if not self.asked.is_set():
            return False
        self.final = True
        return True


async def routers_confirm(instance: Instance, discovery: Discovery, channels: Channels, log: Logger) -> None:
    """Returns when no router places anything on `instance` any more, or after a second: who has not heard by then sends
    a request in vain, which is refused and goes elsewhere."""
    request = router_pb2.ConfirmDrainingRequest(instance_id=instance.instance_id, epoch=instance.epoch)

    async def confirm(router: Instance) -> None:
        stub = router_pb2_grpc.RouterStub(channels.get(router.address))
        try:
            await stub.ConfirmDraining(request, timeout=_CONFIRM_S)
        except grpc.aio.AioRpcError as error:
            log.warning("a router did not confirm the drain", router=router.instance_id, reason=error.code().name)

    routers = [one for one in discovery.by_service("router") if one.state in _DECIDING]
    await asyncio.gather(*map(confirm, routers))
