"""What vLLM, NIXL and their libraries are told by environment variables, there being no other way.

They are read by the processes that vLLM makes from ours, so that one of our processes starts one engine at a time.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

from engines.vllm.config import VllmConfig

__all__ = ["apply", "reserve_port", "resolve", "socket_folder"]

_LONGEST_FOLDER = 107 - len("/00000000-0000-0000-0000-000000000000")
"""A Unix socket's path may have 107 characters, and vLLM names its sockets by UUIDs."""


def resolve(host: str) -> str:
    """The address of `host`: ZeroMQ binds to addresses only."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def reserve_port(address: str) -> socket.socket:
    """A socket that keeps a free port of `address` from everyone but a listener with SO_REUSEADDR, which ZeroMQ is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def socket_folder() -> Path:
    """A new folder for the engine's Unix sockets, under /tmp where the temporary folder's path is too long for them."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))
    if len(str(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-", dir="/tmp"))
    return folder


def apply(config: VllmConfig, address: str, side_channel_port: int, directory: Path) -> None:
    """Sets them for this process and all that come of it."""
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over `kv_cache_memory_mb`
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings come with every start
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.update(
        # vLLM binds each engine of a machine to the same first core.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(config.cpu_threads),
        # Equal block hashes in all engines.
        PYTHONHASHSEED="0",
        # Where the decode side asks for a handshake.
        VLLM_NIXL_SIDE_CHANNEL_HOST=address,
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_channel_port),
        # Sockets between our process, the engine core and its workers, none of which leave the machine.
        VLLM_RPC_BASE_PATH=str(directory),
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_NO_USAGE_STATS="1",
        UCX_RCACHE_MAX_UNRELEASED="1024",
    )
    if ipaddress.ip_address(address).is_loopback:
        os.environ["UCX_NET_DEVICES"] = "lo"
