"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

import math
from typing import Any

import orjson

from controlplane.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    TokenmillError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

__all__ = [
    "BodyTooLarge",
    "BodyTooSlow",
    "ContextLengthExceeded",
    "MethodNotAllowed",
    "ModelNotFound",
    "RouteNotFound",
    "error_body",
    "error_headers",
]


_RETRY_AFTER_S = 1.0
"""Where the error does not know better."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model."""


class BodyTooLarge(InvalidRequest):
    """The request body is over the bound."""

    http_status = 413


class BodyTooSlow(InvalidRequest):
    """The request body took too long to come."""

    http_status = 408


class MethodNotAllowed(InvalidRequest):
    """The route exists for another method."""

    http_status = 405


class RouteNotFound(NotFound):
    """No such URL."""


class ModelNotFound(NotFound):
    """No worker has ever offered this model."""


_CODES: dict[type[TokenmillError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    ModelNotFound: "model_not_found",
    RouteNotFound: "unknown_url",
    MethodNotAllowed: "method_not_allowed",
    BodyTooLarge: "request_too_large",
    BodyTooSlow: "request_timeout",
    Unsupported: "unsupported",
    Unauthenticated: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
}


def error_body(error: TokenmillError) -> bytes:
    """JSON. `code` is OpenAI's name where it has one, else ours; null for plain mistakes in the request."""
    plain = None if type(error) is InvalidRequest else error.code
    content: dict[str, Any] = {
        "message": error.message,
        "type": _type(error),
        "param": error.param or None,
        "code": _CODES.get(type(error), plain),
    }
    return orjson.dumps({"error": content})


def error_headers(error: TokenmillError) -> list[tuple[bytes, bytes]]:
    """Retry-After where trying again may help; a client without a key is told how to send one."""
    headers = []
    if error.retry_after_s or isinstance(error, Overloaded | Unavailable):
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s or _RETRY_AFTER_S)))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def _type(error: TokenmillError) -> str:
    if isinstance(error, Unauthenticated):
        return "authentication_error"
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    return "invalid_request_error" if error.http_status < 500 else "server_error"
