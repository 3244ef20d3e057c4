"""What vLLM, NIXL and their libraries are told by environment variables, there being no other way.

They are read by the processes that vLLM makes from ours, so that one of our processes starts one engine at a time.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from engines.vllm.config import VllmConfig

__all__ = ["apply", "reserve_port", "resolve", "socket_folder"]

_PREFIX = "tokenmill-engine-"
_LONGEST_BASE = 107 - len(f"/{_PREFIX}12345678/00000000-0000-0000-0000-000000000000")
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


def socket_folder() -> tuple[Path, int]:
    """A new folder for the engine's Unix sockets, and a lock on it that ends with this process: close it at the end.

    It is under /tmp where the temporary folder's path is too long for sockets. Removes those of processes that were
    killed.
    """
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_BASE:
        base = Path("/tmp")
    for folder in base.glob(f"{_PREFIX}*"):
        _remove_if_left(folder)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another one that starts took it for left


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # somebody else's, or gone
        return
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


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
