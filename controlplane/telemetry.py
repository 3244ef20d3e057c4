"""Logs and metrics of a service process. Logs never contain prompts, answers, token ids or keys."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import grpc
import orjson
import prometheus_client
import structlog
from prometheus_client import CollectorRegistry

from controlplane.settings import CommonSettings

__all__ = ["Logger", "RequestIdInterceptor", "configure_logging", "get_logger", "new_registry"]

Logger = structlog.stdlib.BoundLogger
REQUEST_ID_KEY = "x-request-id"


def configure_logging(settings: CommonSettings, *, service: str) -> None:
    """Sends this process's logs to stderr, those of libraries included: JSON, or for people in a terminal."""
    human = settings.log_format == "human" or (settings.log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=not human),
    ]
    # Plain tracebacks: the richer ones print local variables, and those may hold a prompt.
    render: list[structlog.typing.Processor] = (
        [
            _escape_unprintable,
            structlog.dev.ConsoleRenderer(
                pad_event_to=0, colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
        if human
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(service=service, instance_id=settings.instance_id)


def get_logger(name: str) -> Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return structlog.stdlib.get_logger(name)


def new_registry(*, service: str, instance_id: str) -> CollectorRegistry:
    """A registry for one service's metrics, with those of its process (CPU, memory, file descriptors) in it."""
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    about = prometheus_client.Info("tokenmill_instance", "Who this is", registry=registry)
    about.info({"service": service, "instance_id": instance_id, "version": version("tokenmill")})
    return registry


class RequestIdInterceptor(grpc.aio.ServerInterceptor):
    """Puts the caller's x-request-id on every log line of the call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Each call runs in a task of its own, so the binding ends with it."""
        for key, value in handler_call_details.invocation_metadata:
            if key == REQUEST_ID_KEY:
                structlog.contextvars.bind_contextvars(request_id=value)
        return await continuation(handler_call_details)


def _escape_unprintable(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What a client sent must not drive the terminal that shows the log, nor write lines of its own."""
    for key, value in event.items():
        if isinstance(value, str) and key not in ("event", "exception") and not value.isprintable():
            event[key] = value.encode("unicode_escape").decode()
    return event


def _to_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()
