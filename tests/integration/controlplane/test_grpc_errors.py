from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from controlplane.channels import Channels
from controlplane.errors import InvalidRequest, Overloaded, TokenmillError, Unavailable, Unsupported
from controlplane.grpc_errors import ErrorInterceptor, from_proto, from_rpc_error, to_proto

Behaviour = Callable[[bytes, Any], Any]


class Server:
    """Serves /t/Unary and /t/Stream, each ending as a test wants it to."""

    def __init__(self, unary: Behaviour, stream: Behaviour) -> None:
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
        }
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", handlers)])
        self._channels = Channels()

    async def __aenter__(self) -> grpc.aio.Channel:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self._channels.get(f"127.0.0.1:{port}")

    async def __aexit__(self, *_: object) -> None:
        await self._channels.close()
        await self._server.stop(None)


def raising(error: Exception) -> tuple[Behaviour, Behaviour, Behaviour]:
    async def unary(_request: bytes, _context: Any) -> bytes:
        raise error

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    async def writing_stream(_request: bytes, context: Any) -> None:
        await context.write(b"first")
        raise error

    return unary, stream, writing_stream


async def outcome(call: Awaitable[Any]) -> TokenmillError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def read_stream(channel: grpc.aio.Channel, received: list[bytes]) -> None:
    async for message in channel.unary_stream("/t/Stream")(b""):
        received += [message]


async def test_an_error_raised_in_a_servicer_arrives_whole() -> None:
    unary, stream, writing_stream = raising(Overloaded("queue full", param="priority", retry_after_s=1.5))
    for streaming in (stream, writing_stream):
        async with Server(unary, streaming) as channel:
            received: list[bytes] = []
            for call in (channel.unary_unary("/t/Unary")(b""), read_stream(channel, received)):
                error = await outcome(call)
                assert type(error) is Overloaded
                assert (error.message, error.param, error.retry_after_s) == ("queue full", "priority", 1.5)
            assert received == [b"first"]


async def test_classes_that_share_a_status_stay_apart() -> None:
    async with Server(*raising(Unsupported("no logprobs"))[:2]) as channel:
        assert type(await outcome(channel.unary_unary("/t/Unary")(b""))) is Unsupported


async def test_an_unexpected_exception_tells_the_caller_nothing_of_the_inside() -> None:
    async with Server(*raising(RuntimeError("secret path"))[:2]) as channel:
        error = await outcome(channel.unary_unary("/t/Unary")(b""))
        assert type(error) is TokenmillError
        assert "secret" not in error.message


async def test_a_failed_call_to_another_service_is_passed_on() -> None:
    async with Server(*raising(InvalidRequest("bad", param="n"))[:2]) as behind:

        async def forward(request: bytes, _context: Any) -> bytes:
            return bytes(await behind.unary_unary("/t/Unary")(request))

        async with Server(forward, forward) as front:
            error = await outcome(front.unary_unary("/t/Unary")(b""))
            assert type(error) is InvalidRequest
            assert error.param == "n"


async def test_nobody_listening_is_unavailable() -> None:
    channels = Channels()
    error = await outcome(channels.get("127.0.0.1:1").unary_unary("/t/Unary")(b""))
    assert type(error) is Unavailable
    await channels.close()


def test_an_error_survives_the_trip_through_a_stream_message() -> None:
    error = from_proto(to_proto(Overloaded("full", param="n", retry_after_s=0.25)))
    assert (type(error), error.message, error.param, error.retry_after_s) == (Overloaded, "full", "n", 0.25)
