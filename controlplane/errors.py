"""Every error Tokenmill raises on purpose.

    TokenmillError
    ├── InvalidRequest       the caller's request is wrong; nothing was done
    │   └── Unsupported      right in itself, but this engine or version cannot do it
    ├── NotFound             no such model, request or instance
    ├── Unauthenticated      no key, or a wrong one
    ├── Overloaded           full; try again later
    ├── Unavailable          nobody can serve this now; try again later
    │   ├── Draining         this instance is being taken out of use; another one can
    │   └── Stalled          this instance's engine makes no steps; it may go on
    ├── DeadlineExceeded     the request's own time ran out
    ├── Cancelled            the caller went away or asked to stop
    ├── KvRefused            a KV handle is expired, foreign or of another format
    ├── EngineFailed         the engine broke while serving this request
    └── SettingsError        the configuration is wrong; the process does not start

A class carries its gRPC and HTTP status; the mappings are in `controlplane/grpc_errors.py` and
`services/frontend/openai_errors.py`. A message says what was wrong, where, and what to do; it never quotes a prompt.
"""

from __future__ import annotations

from typing import ClassVar

import grpc

__all__ = [
    "Cancelled",
    "DeadlineExceeded",
    "Draining",
    "EngineFailed",
    "InvalidRequest",
    "KvRefused",
    "NotFound",
    "Overloaded",
    "SettingsError",
    "Stalled",
    "TokenmillError",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "error_class",
]


class TokenmillError(Exception):
    """The root. `param` names the field at fault; `retry_after_s` is advice, 0 for none."""

    code: ClassVar[str] = "internal"
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(TokenmillError):
    """The request cannot be served as it is written."""

    code = "invalid_request"
    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class Unsupported(InvalidRequest):
    """The engine serving this model lacks what the request needs."""

    code = "unsupported"
    status = grpc.StatusCode.UNIMPLEMENTED


class NotFound(TokenmillError):
    """No such model, request or instance."""

    code = "not_found"
    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class Unauthenticated(TokenmillError):
    """No API key, or one that is not accepted."""

    code = "unauthenticated"
    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class Overloaded(TokenmillError):
    """A bound was reached; the work was refused before it began."""

    code = "overloaded"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class Unavailable(TokenmillError):
    """Nobody can serve this now."""

    code = "unavailable"
    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class Draining(Unavailable):
    """This instance takes no new work, or has no more time for it. Nothing is wrong with it or with the request."""

    code = "draining"


class Stalled(Unavailable):
    """The engine has work and makes no steps. What it had was given up; once it moves again it is as good as before."""

    code = "stalled"


class DeadlineExceeded(TokenmillError):
    """The time the caller allowed is over."""

    code = "deadline_exceeded"
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(TokenmillError):
    """The caller hung up or asked to stop."""

    code = "cancelled"
    status = grpc.StatusCode.CANCELLED
    http_status = 499


class KvRefused(TokenmillError):
    """A KV handle that must not be used."""

    code = "kv_refused"
    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class EngineFailed(TokenmillError):
    """The engine broke; the request may be tried elsewhere."""

    code = "engine_failed"
    status = grpc.StatusCode.INTERNAL


class SettingsError(TokenmillError):
    """The configuration is wrong."""

    code = "settings"
    status = grpc.StatusCode.FAILED_PRECONDITION


def error_class(code: str) -> type[TokenmillError]:
    """The class whose `code` this is; `TokenmillError` for one that this version does not know."""
    return _BY_CODE.get(code, TokenmillError)


_BY_CODE: dict[str, type[TokenmillError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, Unsupported, NotFound, Unauthenticated, Overloaded, Unavailable, Draining, Stalled,
        DeadlineExceeded, Cancelled, KvRefused, EngineFailed, SettingsError,
    )
}  # fmt: skip
