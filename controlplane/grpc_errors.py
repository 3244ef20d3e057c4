"""The error tree over gRPC: raise `TokenmillError` in a servicer, catch it at the caller.

A refused call carries google.rpc.Status in its trailing metadata, as gRPC's rich error model says, with an
`ErrorDetail` inside; clients that know neither still see status code and message.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from controlplane.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TokenmillError,
    Unauthenticated,
    Unavailable,
    Unsupported,
    error_class,
)
from controlplane.telemetry import get_logger
from tokenmill.common.v1 import common_pb2

__all__ = ["ErrorInterceptor", "abort_with", "from_proto", "from_rpc_error", "to_proto"]

_DETAILS_KEY = "grpc-status-details-bin"

_BY_STATUS: dict[grpc.StatusCode, type[TokenmillError]] = {
    cls.status: cls
    for cls in (
        Cancelled, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unauthenticated, Unavailable, Unsupported,
    )
}  # fmt: skip
"""For calls that failed without our detail: gRPC itself refused them, or a proxy."""


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TokenmillError) -> NoReturn:
    """Ends the call with this error."""
    detail = any_pb2.Any()
    detail.Pack(
        common_pb2.ErrorDetail(code=error.code, param=error.param, retry_after_ms=round(error.retry_after_s * 1000))
    )
    status = status_pb2.Status(code=error.status.value[0], message=error.message, details=[detail])
    await context.abort(error.status, error.message, ((_DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: grpc.aio.AioRpcError) -> TokenmillError:
    """The error the other side raised, or the nearest to what gRPC says became of the call."""
    message = error.details() or f"the call ended with {error.code().name}"
    detail = _detail(error)
    if detail is None:
        return _BY_STATUS.get(error.code(), TokenmillError)(message)
    return error_class(detail.code)(message, param=detail.param, retry_after_s=detail.retry_after_ms / 1000)


def to_proto(error: TokenmillError) -> common_pb2.Error:
    """For a stream, where one request fails and the call goes on."""
    retry_after_ms = round(error.retry_after_s * 1000)
    return common_pb2.Error(code=error.code, message=error.message, param=error.param, retry_after_ms=retry_after_ms)


def from_proto(error: common_pb2.Error) -> TokenmillError:
    """The inverse of `to_proto`."""
    return error_class(error.code)(error.message, param=error.param, retry_after_s=error.retry_after_ms / 1000)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets async servicers raise.

    A `TokenmillError` ends the call with its status and detail, a failed call of theirs to another service with that
    one's; any other exception is logged and answered with INTERNAL alone.
    """

    def __init__(self) -> None:
        self._log = get_logger(__name__)
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        """By method: a server's methods do not change, and wrapping one takes longer than calling it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's behaviour."""
        known = self._wrapped.get(handler_call_details.method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        words = {False: "unary", True: "stream"}
        kind = f"{words[handler.request_streaming]}_{words[handler.response_streaming]}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = self._guard(getattr(handler, kind), handler_call_details.method)
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        self._wrapped[handler_call_details.method] = wrapped
        return wrapped

    def _guard(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:
                await self._abort(error, context, method)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await self._abort(error, context, method)

        return stream if inspect.isasyncgenfunction(behaviour) else call

    async def _abort(self, error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
        match error:
            case grpc.aio.AbortError():
                raise error
            case TokenmillError():
                await abort_with(context, error)
            case grpc.aio.AioRpcError():
                await abort_with(context, from_rpc_error(error))
            case _:
                self._log.error("call failed unexpectedly", method=method, exc_info=error)
                await abort_with(context, TokenmillError("internal error; the service's log says more"))


def _detail(error: grpc.aio.AioRpcError) -> common_pb2.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
                for packed in status.details:
                    detail = common_pb2.ErrorDetail()
                    if packed.Unpack(detail):
                        return detail
            except DecodeError:
                return None
    return None
