"""Feels the pulse of instances that owe an answer, so that a stopped one is not waited for until the deadline.

Each second the gRPC health service is asked. Whatever it says is a sign of life: one that does not serve may be
finishing what it has, and fails its calls itself where it cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.channels import Channels
from controlplane.errors import Unavailable
from services.frontend.calls import result

__all__ = ["Pulses"]

T = TypeVar("T")

_FIRST_S = 0.25
"""Most calls are answered sooner, and nobody's pulse is felt."""
_EACH_S = 1.0
_SILENT = 3
"""Questions in a row without an answer. A stall of this process makes for one."""


@dataclass(slots=True)
class _Prober:
    lost: asyncio.Future[None]
    task: asyncio.Task[None]
    calls: int = 0


class Pulses:
    """One prober an address, for as long as calls to it are pending."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._probers: dict[str, _Prober] = {}

    async def unless_lost(self, address: str, call: Awaitable[T]) -> T:
        """What the call returns; raises its error. Ends it, and raises `Unavailable`, when that address is silent."""
        prober = self._probers.get(address) or self._start(address)
        prober.calls += 1
        answer = asyncio.ensure_future(result(call))
        try:
            either: set[asyncio.Future[Any]] = {answer, prober.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                prober.lost.result()
            return await answer
        finally:
            answer.cancel()
            prober.calls -= 1
            if not prober.calls:
                prober.task.cancel()
                if self._probers.get(address) is prober:
                    del self._probers[address]

    def _start(self, address: str) -> _Prober:
        lost = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._probe(address, lost), name=f"pulse of {address}")
        prober = self._probers[address] = _Prober(lost, task)
        return prober

    async def _probe(self, address: str, lost: asyncio.Future[None]) -> None:
        stub = health_pb2_grpc.HealthStub(self._channels.get(address))
        loop = asyncio.get_running_loop()
        silent = 0
        at = loop.time() + _FIRST_S
        while silent < _SILENT:
            await asyncio.sleep(at - loop.time())
            at = loop.time() + _EACH_S
            silent = 0 if await _answers(stub) else silent + 1
        self._probers.pop(address, None)  # who calls from now on begins anew
        lost.set_exception(Unavailable(f"{address} was silent for {_SILENT * _EACH_S:g} s"))
        lost.exception()  # whoever waited for it may have gone


async def _answers(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=_EACH_S)
    except grpc.aio.AioRpcError as error:
        return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True
