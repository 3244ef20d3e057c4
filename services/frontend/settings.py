"""The frontend's settings."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting

__all__ = ["FrontendSettings"]


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """Section [frontend]."""

    http_port: int = setting(
        8000, "port of the OpenAI HTTP API; 0 takes a free one", minimum=0, maximum=65535, flag="--port"
    )
    api_keys: str = setting("", "keys clients must send as bearer token, comma separated; none: open", secret=True)
    tls_cert: str = setting(
        "", "PEM file with the certificate for HTTP and gRPC, its CAs after it; none: clear text", metavar="FILE"
    )
    tls_key: str = setting("", "PEM file with the key of tls_cert", metavar="FILE")
    tls_client_ca: str = setting(
        "",
        "PEM file with the CAs one of which must have signed a client's certificate; none: any client",
        metavar="FILE",
    )
    max_concurrent_requests: int = setting(
        1024, "answers in the making at once; further requests get 429", minimum=1, maximum=1_000_000
    )
    max_connections: int = setting(
        4096,
        "open HTTP connections, and gRPC calls; further ones get 503 and are closed, and RESOURCE_EXHAUSTED",
        minimum=1,
        maximum=1_000_000,
    )
    max_bodies_mb: int = setting(
        256, "request bodies in memory, all together, MiB; more get 429", minimum=1, maximum=1_000_000
    )
    max_body_mb: int = setting(16, "largest request body, MiB", minimum=1, maximum=1024)
    max_header_kb: int = setting(32, "largest request head (line and headers), KiB", minimum=1, maximum=1024)
    read_timeout_s: float = setting(
        30.0,
        "longest time for a request's head, and for its body to begin to come and come at 16 KiB/s, seconds",
        minimum=0.001,
    )
    idle_timeout_s: float = setting(
        75.0, "longest time a connection may be without a request after an answer, seconds", minimum=0.001
    )
    request_timeout_s: float = setting(
        600.0, "longest time one request may take, seconds", minimum=0.001, maximum=1_000_000
    )
    prefill_timeout_s: float = setting(
        60.0, "longest wait for a prefill worker before decode computes the prompt itself, seconds", minimum=0.001
    )
    schedule_timeout_s: float = setting(
        0.25, "longest wait for the router before a worker is chosen without it, seconds", minimum=0.001
    )
    max_attempts: int = setting(
        3, "workers that one answer is tried on, one after another, before it fails", minimum=1, maximum=100
    )
    replacement_wait_s: float = setting(
        30.0,
        "longest wait for a worker while nobody can serve a model, as after a crash, before 503, seconds",
        minimum=0,
    )
    migration: bool = setting(
        True,
        "an answer whose worker is lost goes on on another; off: it ends with an error once any of it was sent",
    )
    client_buffer_kb: int = setting(
        256, "unread output kept for a slow client before its request is cancelled, KiB", minimum=1
    )
    min_flush_ms: int = setting(
        1, "longest time a decode worker lets tokens wait to share a message, milliseconds", minimum=0, maximum=20
    )
