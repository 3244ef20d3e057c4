"""The Supervisor gRPC service, on a Unix socket in a folder that only its owner may enter."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from controlplane.grpc_errors import ErrorInterceptor
from controlplane.kept_child import Child
from controlplane.supervisor import Supervisor
from tokenmill.supervisor.v1 import supervisor_pb2, supervisor_pb2_grpc

__all__ = ["supervisor_called", "supervisor_served"]

_SOCKET = "supervisor.sock"

Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def supervisor_served(supervisor: Supervisor, folder: Path) -> AsyncIterator[None]:
    """Serves it in this folder, which must exist, as long as the context lasts."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    supervisor_pb2_grpc.add_SupervisorServicer_to_server(_Servicer(supervisor), server)
    with _Address(folder) as address:
        server.add_insecure_port(address.target)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)


@asynccontextmanager
async def supervisor_called(folder: Path) -> AsyncIterator[supervisor_pb2_grpc.SupervisorStub]:
    """Calls to the supervisor that serves in this folder."""
    with _Address(folder) as address:
        async with grpc.aio.insecure_channel(address.target) as channel:
            yield supervisor_pb2_grpc.SupervisorStub(channel)


class _Address:
    """The socket, by a path that is short wherever the folder is: a socket's own may have 107 characters at most."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def __enter__(self) -> _Address:
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def target(self) -> str:
        return f"unix:/proc/self/fd/{self._descriptor}/{_SOCKET}"


class _Servicer(supervisor_pb2_grpc.SupervisorServicer):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def List(  # noqa: N802  this and Restart are gRPC's names
        self, request: supervisor_pb2.ListRequest, context: Context
    ) -> supervisor_pb2.ListResponse:
        return supervisor_pb2.ListResponse(children=map(_to_proto, self._supervisor.children()))

    async def Restart(  # noqa: N802
        self, request: supervisor_pb2.RestartRequest, context: Context
    ) -> supervisor_pb2.RestartResponse:
        child = await self._supervisor.restart(request.name, successor_first=request.successor_first)
        return supervisor_pb2.RestartResponse(child=_to_proto(child))


def _to_proto(child: Child) -> supervisor_pb2.Child:
    return supervisor_pb2.Child(
        name=child.name,
        state=supervisor_pb2.ChildState.ValueType(child.state.value),
        pid=child.pid,
        instance_id=child.instance_id,
    )
