"""Gives back KV that nobody will read, again and again until the worker has heard of it or its lease is over anyway."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from controlplane.channels import Channels
from controlplane.errors import TokenmillError
from controlplane.telemetry import get_logger
from services.frontend.calls import result
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc

__all__ = ["Releases"]

_TIMEOUT_S = 2.0
_AGAIN_S, _LONGEST_S = 0.5, 8.0
_GIVEN_UP_S = 60.0
_MOST_WAITING = 10_000
"""An address. Past that the oldest is left to its lease."""


@dataclass(frozen=True, slots=True)
class _Release:
    request: prefill_pb2.ReleaseRequest
    trace_id: str
    until: float


class Releases:
    """One queue an address, sent one after another, so that a stopped worker holds up no other's."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._waiting: dict[str, deque[_Release]] = {}
        self._senders: asyncio.TaskGroup | None = None
        self._log = get_logger(__name__)

    def add(self, address: str, request: prefill_pb2.ReleaseRequest, trace_id: str) -> None:
        """To be sent to the prefill worker at this address, in the name of that client's request.

        Not while nothing is sent, before `run` and after it: then its lease ends it.
        """
        release = _Release(request, trace_id, asyncio.get_running_loop().time() + _GIVEN_UP_S)
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.append(release)
        elif self._senders is not None:
            self._waiting[address] = deque([release], _MOST_WAITING)
            self._senders.create_task(self._send(address), name=f"KV releases {address}")

    async def run(self) -> None:
        """Sends, until cancelled."""
        async with asyncio.TaskGroup() as self._senders:
            try:
                await asyncio.Event().wait()
            finally:
                self._senders = None

    async def _send(self, address: str) -> None:
        """Until nothing waits for this address."""
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(address))
        waiting = self._waiting[address]
        loop = asyncio.get_running_loop()
        pause_s = _AGAIN_S
        while waiting:
            release = waiting[0]
            call = stub.Release(release.request, timeout=_TIMEOUT_S, metadata=(("x-request-id", release.trace_id),))
            try:
                await result(call)
            except TokenmillError as error:
                if loop.time() + pause_s < release.until:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_S)
                    continue
                self._log.info("KV was not given back; its lease will end", prefill=address, reason=error.message)
            pause_s = _AGAIN_S
            if waiting and waiting[0] is release:  # a full queue may have dropped it meanwhile
                waiting.popleft()
        del self._waiting[address]
