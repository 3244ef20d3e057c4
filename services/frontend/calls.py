"""What every call to another service has in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from controlplane.errors import Unavailable
from controlplane.grpc_errors import from_rpc_error
from services.frontend.generation import Generation

__all__ = ["left_s", "metadata", "result"]

T = TypeVar("T")


async def result(call: Awaitable[T]) -> T:
    """What the call returns; raises the error that the other side raised."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not we were cancelled but the call, with its channel: whoever served that address is gone.
        raise Unavailable("the connection was closed") from None


def left_s(generation: Generation) -> float:
    """Time until the answer must be complete; never quite nothing."""
    return max(generation.deadline - asyncio.get_running_loop().time(), 0.001)


def metadata(generation: Generation) -> tuple[tuple[str, str], ...]:
    """Names the client's request to every service."""
    return (("x-request-id", generation.trace_id),)
