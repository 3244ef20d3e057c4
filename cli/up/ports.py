"""The ports a deployment's frontend is reached at, opened by `up` and held until it ends.

Frontends come and go behind them: one that is killed leaves new connections waiting in the kernel, and one that is
followed by another shares them with it for a while.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from controlplane.errors import Unavailable
from controlplane.listen_fds import BACKLOG

__all__ = ["FrontendPorts"]


class FrontendPorts:
    """Raises `Unavailable` for a port that is taken. 0 takes a free one, or for metrics another one each time."""

    def __init__(self, host: str, *, http: int, grpc: int, metrics: int) -> None:
        with ExitStack() as opened:
            self._http = opened.enter_context(_bound(host, http, "--port", socket.SO_REUSEADDR))
            self._http.listen(BACKLOG)
            self._http.setblocking(False)
            # Frontends open these themselves. The sockets here, which never listen, keep the ports from others.
            self._grpc = opened.enter_context(_bound(host, grpc, "--grpc-port", socket.SO_REUSEPORT))
            if metrics:
                opened.enter_context(_bound(host, metrics, "--metrics-port", socket.SO_REUSEPORT))
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def http(self) -> int:
        """Number of the HTTP port."""
        return int(self._http.getsockname()[1])

    @property
    def grpc(self) -> int:
        """Number of the gRPC port."""
        return int(self._grpc.getsockname()[1])

    @property
    def sockets(self) -> tuple[int, ...]:
        """Descriptors of the listening sockets that each frontend is given."""
        return (self._http.fileno(),)


def _bound(host: str, port: int, flag: str, option: int) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        one.setsockopt(socket.SOL_SOCKET, option, 1)
        one.bind((host, port))
    except OSError as error:
        one.close()
        raise Unavailable(
            f"port {port} on {host} cannot be used ({error.strerror}); give another with {flag} PORT, or {flag} 0 "
            "for a free one"
        ) from error
    return one
