"""gRPC channels to the other services, one per address."""

from __future__ import annotations

import asyncio

import grpc

__all__ = ["MESSAGE_OPTIONS", "Channels"]

MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)

_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A service that restarts is reached again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # what one attempt to connect may take
    # A peer whose machine vanished is noticed; a stall of some seconds is not mistaken for that.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class Channels:
    """Owns the channels it hands out; callers never close them."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`. It connects on first use and reconnects by itself."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def drop(self, address: str, grace_s: float | None = None) -> None:
        """Forgets an address nobody serves any more. Calls still running are cancelled after `grace_s`, or at once."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(grace_s)

    async def close(self) -> None:
        """Cancels every call and closes every channel."""
        await asyncio.gather(*(self.drop(address) for address in list(self._channels)))
