"""UCX's settings: it reads them from the environment, and by default it listens on every interface of the machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from transfer.errors import NoSuchInterface

__all__ = ["interface_of", "ucx_environment"]

_SIOCGIFADDR = 0x8915


def ucx_environment(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environ` before the first agent starts, so that it listens on `host`'s interface and no other.

    Leaves alone what is set: an operator who names RDMA devices in UCX_NET_DEVICES knows better. Raises
    `NoSuchInterface` when `host` is not an address of this machine.
    """
    wanted = {
        # Blocks of many models stay registered for the life of the process; UCX warns of them as if they had leaked.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    if "UCX_NET_DEVICES" not in environ:
        wanted["UCX_NET_DEVICES"] = interface_of(host)
    return {key: value for key, value in wanted.items() if key not in environ}


def interface_of(host: str) -> str:
    """Name of the network interface that carries the address of `host`, e.g. "lo" for 127.0.0.1."""
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, None, socket.AF_INET)}
    except OSError as error:
        raise NoSuchInterface(f"cannot resolve {host!r}: {error}") from error
    if any(str(address).startswith("127.") for address in wanted):
        wanted = {"127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) in wanted:
                return name
    raise NoSuchInterface(
        f"no network interface of this machine has the address of {host!r}; KV transfers must be reachable there. "
        "Advertise an address of this machine, or name the device in UCX_NET_DEVICES"
    )
