"""gRPC channels to the other services, one per address."""

from __future__ import annotations

import asyncio
from collections.abc import Container

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


_DOWN = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)


class Channels:
    """Owns the channels it hands out; callers never close them, and hold their stub for as long as they use it."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`. It connects on first use and reconnects by itself."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    def tidy(self, known: Container[str]) -> None:
        """Forgets what has no connection to an address that is not `known`.

        Closed it is when its last stub is gone, for a closed one breaks who still uses it: one that tries again later,
        or reads what comes over the connection after the other side has said that it goes.
        """
        for address, channel in list(self._channels.items()):
            if address not in known and channel.get_state() in _DOWN:
                del self._channels[address]

    async def close(self) -> None:
        """Cancels every call and closes every channel."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
