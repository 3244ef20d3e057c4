"""What every service listens with: a gRPC server with health and reflection, and the Prometheus endpoint."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from controlplane.channels import MESSAGE_OPTIONS
from controlplane.errors import SettingsError
from controlplane.grpc_errors import ErrorInterceptor
from controlplane.telemetry import RequestIdInterceptor

__all__ = ["MAX_CALLS", "GrpcListener", "MetricsListener", "host_port"]

_OPTIONS = (
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
MAX_CALLS = 16_384
"""Far more than a worker admits, or frontends and health checks keep open with it: what comes beyond is a fault."""
_OPEN_CALLS_S = 1.0
"""Time for answers under way when the server stops."""


def host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class GrpcListener:
    """A gRPC server whose health says NOT_SERVING until told otherwise."""

    def __init__(self, *, share_port: bool = False, max_calls: int = MAX_CALLS) -> None:
        """With more than `max_calls` open, whatever they are for, gRPC refuses new ones with RESOURCE_EXHAUSTED."""
        options = (*_OPTIONS, ("grpc.so_reuseport", int(share_port)))  # else a port in use is an error
        self.server = grpc.aio.server(
            options=options,
            interceptors=[RequestIdInterceptor(), ErrorInterceptor()],
            maximum_concurrent_rpcs=max_calls,
        )
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    async def start(
        self, host: str, port: int, service_names: Sequence[str], credentials: grpc.ServerCredentials | None = None
    ) -> int:
        """Listens; returns the port. `service_names` are those added to `server`, for health and reflection.

        With `credentials` it speaks TLS, else clear text.
        """
        self._names = [health.OVERALL_HEALTH, *service_names]
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server)
        try:
            if credentials is None:
                bound = self.server.add_insecure_port(host_port(host, port))
            else:
                bound = self.server.add_secure_port(host_port(host, port), credentials)
        except RuntimeError as error:
            message = f"cannot listen on {host_port(host, port)}; is the port taken?"
            raise SettingsError(message, param="common.grpc_port") from error
        await self.server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What the health service says of this process and each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, open_calls_s: float = _OPEN_CALLS_S) -> None:
        """Stops listening, tells callers to connect elsewhere (GOAWAY), and gives calls still open some time to end."""
        await self.server.stop(open_calls_s)


class MetricsListener:
    """The Prometheus endpoint, `GET /metrics`, on a thread of its own."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, share_port: bool = False) -> None:
        try:
            self._server = make_server(
                host, port, make_wsgi_app(registry), _SharingServer if share_port else _Server, handler_class=_Handler
            )
        except OSError as error:
            message = f"cannot serve metrics on {host_port(host, port)}: {error.strerror}"
            raise SettingsError(message, param="common.metrics_port") from error
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stops listening."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """IPv4, or IPv6 where the address is."""

    def __init__(self, address: tuple[str, int], *more: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, *more)


class _SharingServer(_Server):
    allow_reuse_port = True


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """A scrape is no news."""
