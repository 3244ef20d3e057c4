"""The connection to etcd under `Discovery`: what etcd3aio leaves open, or leaks.

Every call has a deadline, a broken connection is noticed at once, and each session has a channel of its own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from etcd3aio import EtcdError, prefix_range_end
from etcd3aio.lease import LeaseService
from etcd3aio.watch import WatchCreateRequest, WatchRequest, WatchStub

from controlplane.errors import SettingsError

__all__ = [
    "CALL_S",
    "FAILURES",
    "SessionLost",
    "lease_renewed",
    "open_channel",
    "parse_endpoints",
    "until_disconnected",
]

CALL_S = 3.0
"""Deadline of every call to etcd."""

_OPTIONS = (
    # Sharing the connection with an earlier channel would share its back-off too, of up to two minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
)


class SessionLost(Exception):
    """Nothing more will come of this session with etcd."""


FAILURES = (SessionLost, EtcdError, grpc.aio.AioRpcError, OSError)  # TimeoutError is an OSError


def parse_endpoints(text: str) -> list[tuple[str, str]]:
    """ "host:port,..." as (host, port) pairs. Raises `SettingsError`."""
    endpoints = []
    for endpoint in text.split(","):
        host, _, port = endpoint.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise SettingsError(f"etcd = {endpoint!r} is not of the form host:port", param="common.etcd")
        endpoints.append((host, port))
    return endpoints


async def open_channel(endpoints: Sequence[tuple[str, str]]) -> grpc.aio.Channel:
    """A new channel, not connected yet. gRPC resolves one name by itself; of several servers it wants the addresses."""
    if len(endpoints) == 1:
        target = ":".join(endpoints[0])
    else:
        resolve = asyncio.get_running_loop().getaddrinfo
        addresses = []
        async with asyncio.timeout(CALL_S):
            for host, port in endpoints:
                *_, address = (await resolve(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM))[0]
                addresses.append(f"{address[0]!s}:{port}")
        target = "ipv4:" + ",".join(addresses)
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def until_disconnected(channel: grpc.aio.Channel) -> None:
    """Waits for the connection to break; raises `SessionLost`."""
    state = channel.get_state()
    while state is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
    raise SessionLost("disconnected")


async def watch_prefix(channel: grpc.aio.Channel, prefix: str, revision: int) -> AsyncGenerator[list[Any], None]:
    """Events of every key below `prefix` from a revision on, as they come; raises when there will be no more.

    etcd3aio's own watch hides breaks, and leaves a task behind at each.
    """
    wanted = WatchCreateRequest(key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=revision)
    call = WatchStub(channel).Watch()
    try:
        await call.write(WatchRequest(create_request=wanted))
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.canceled:
                raise SessionLost(f"the watch was cancelled: {response.cancel_reason or 'compacted'}")
            yield list(response.events)
    finally:
        call.cancel()
    raise SessionLost("the watch ended")


async def lease_renewed(lease: LeaseService, lease_id: int) -> bool:
    """Renews a lease; False when it is gone. etcd3aio's own keepalive has no deadline."""
    call = lease.keep_alive(lease_id)
    try:
        async with asyncio.timeout(CALL_S):
            answer = await call.read()
    finally:
        call.cancel()
    if answer is grpc.aio.EOF:
        raise SessionLost("the keepalive was not answered")
    return bool(answer.TTL > 0)
