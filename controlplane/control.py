"""The Control gRPC service, which every service's host adds: drain, undrain, status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from controlplane.drain import Drain
from controlplane.errors import NotFound
from controlplane.instances import State
from tokenmill.control.v1 import control_pb2, control_pb2_grpc

__all__ = ["ControlServicer"]

Context = grpc.aio.ServicerContext[Any, Any]


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Passes on what is asked, and tells what the host knows."""

    def __init__(
        self,
        drain: Drain,
        instance_id: str,
        *,
        timeout_s: float,
        state: Callable[[], State],
        unfinished: Callable[[], int],
    ) -> None:
        self._drain = drain
        self._instance_id = instance_id
        self._timeout_s = timeout_s
        self._state = state
        self._unfinished = unfinished

    def add_to(self, server: grpc.aio.Server) -> str:
        """Returns the service's full name."""
        control_pb2_grpc.add_ControlServicer_to_server(self, server)
        return control_pb2.DESCRIPTOR.services_by_name["Control"].full_name

    async def Drain(  # noqa: N802  this and the others are gRPC's names
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        """Answers when the drain is public and the routers have taken notice."""
        self._check(request.instance_id)
        self._drain.ask(request.timeout_ms / 1000 if request.HasField("timeout_ms") else self._timeout_s)
        await self._drain.begun.wait()
        return control_pb2.DrainResponse(timeout_ms=round(self._drain.left_s * 1000))

    async def Undrain(  # noqa: N802
        self, request: control_pb2.UndrainRequest, context: Context
    ) -> control_pb2.UndrainResponse:
        """Answers when the instance takes work again."""
        self._check(request.instance_id)
        begun = self._drain.asked.is_set() or self._drain.begun.is_set()
        self._drain.take_back()
        if begun:
            await self._drain.undone.wait()
        return control_pb2.UndrainResponse()

    async def Status(  # noqa: N802
        self, request: control_pb2.StatusRequest, context: Context
    ) -> control_pb2.StatusResponse:
        """How far it has come."""
        self._check(request.instance_id)
        return control_pb2.StatusResponse(
            state=self._state(),
            unfinished=self._unfinished(),
            timeout_ms=round(self._drain.left_s * 1000) if self._drain.asked.is_set() else 0,
        )

    def _check(self, instance_id: str) -> None:
        if instance_id != self._instance_id:
            raise NotFound(
                f"this is {self._instance_id}, not {instance_id}; look again where it is", param="instance_id"
            )
