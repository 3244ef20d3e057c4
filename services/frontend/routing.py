"""What a client says of when and where its request is to run: HTTP headers, or gRPC metadata of the same names. Pure.

    x-tokenmill-priority: -10        a whole number; higher classes are placed first when requests have to wait
    x-tokenmill-tenant: NAME         tenants of one class take turns; where there are API keys, the key is the tenant
    x-tokenmill-session: ID          requests of one session go to the same worker where that can serve them
    x-tokenmill-session-hard: true   ... and to no other as long as it lives
    x-tokenmill-worker: INSTANCE     this decode worker or nobody
    x-tokenmill-labels: k=v,k2=v2    only workers with these labels

A wrong value is refused, naming the header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from controlplane.errors import InvalidRequest
from services.frontend.fields import shown

__all__ = ["ANYWHERE", "Routing", "key_tenant", "read_routing"]

PREFIX = "x-tokenmill-"
LEAST_PRIORITY, MOST_PRIORITY = -(2**31), 2**31 - 1
MOST_LABELS = 16
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_LABEL = re.compile(r"([A-Za-z0-9._/-]{1,64})=([A-Za-z0-9._:@/-]{0,64})")


@dataclass(frozen=True, slots=True)
class Routing:
    """Where one request may run, and whom it may hold up."""

    priority: int = 0
    tenant: str = ""
    session: str = ""
    """As the client names it."""
    session_hard: bool = False
    worker: str = ""
    """The one decode worker."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        """What routers call the session: tenants have their own, and nobody else reads what a client's name says."""
        if not self.session:
            return ""
        return blake2b(f"{self.tenant}\0{self.session}".encode(), digest_size=8).hexdigest()

    def allows(self, instance_id: str, labels: Mapping[str, str]) -> bool:
        """Whether this decode worker may serve it; what only a router knows left aside."""
        return self.worker in ("", instance_id) and self.labels.items() <= labels.items()

    def with_priority(self, priority: int | None) -> Routing:
        """With what the request itself says. Raises `InvalidRequest` where the header differs."""
        if priority is not None and self.priority and priority != self.priority:
            raise InvalidRequest(
                f"priority is {priority}, but the header {PREFIX}priority says {self.priority}; leave one out",
                param="priority",
            )
        return replace(self, priority=priority) if priority else self


ANYWHERE = Routing()
"""A request that says nothing of it."""


def read_routing(header: Callable[[str], str], tenant: str) -> Routing:
    """`header` gives a header's value, empty when absent; `tenant` is the API key's. Raises `InvalidRequest`."""
    named = _name(header, "tenant")
    if named and tenant:
        raise InvalidRequest(
            f"{PREFIX}tenant is {shown(named)}, but here the API key is the tenant; leave the header out",
            param=f"{PREFIX}tenant",
        )
    session = _name(header, "session")
    session_hard = _flag(header, "session-hard")
    if session_hard and not session:
        raise InvalidRequest(
            f"{PREFIX}session-hard is true without a session; name it with {PREFIX}session",
            param=f"{PREFIX}session-hard",
        )
    return Routing(_priority(header), named or tenant, session, session_hard, _name(header, "worker"), _labels(header))


def key_tenant(key: bytes) -> str:
    """The tenant that an API key stands for; says nothing of the key."""
    return f"key-{blake2b(key, digest_size=6).hexdigest()}"


def _priority(header: Callable[[str], str]) -> int:
    given = header(f"{PREFIX}priority").strip()
    if not given:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,10}", given) or not LEAST_PRIORITY <= int(given) <= MOST_PRIORITY:
        raise _wrong("priority", given, f"must be a whole number between {LEAST_PRIORITY} and {MOST_PRIORITY}")
    return int(given)


def _name(header: Callable[[str], str], name: str) -> str:
    given = header(PREFIX + name).strip()
    if given and not _NAME.fullmatch(given):
        raise _wrong(name, given, "may have 1 to 128 letters, digits and the characters . _ : @ / -")
    return given


def _flag(header: Callable[[str], str], name: str) -> bool:
    given = header(PREFIX + name).strip().lower()
    if given not in ("", "true", "false"):
        raise _wrong(name, given, "must be true or false")
    return given == "true"


def _labels(header: Callable[[str], str]) -> dict[str, str]:
    given = header(f"{PREFIX}labels").strip()
    labels: dict[str, str] = {}
    for pair in given.split(",") if given else ():
        match = _LABEL.fullmatch(pair.strip())
        if match is None or match[1] in labels or len(labels) == MOST_LABELS:
            raise _wrong("labels", given, f"must be name=value pairs, comma separated, {MOST_LABELS} at most")
        labels[match[1]] = match[2]
    return labels


def _wrong(name: str, given: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{PREFIX}{name} is {shown(given)}, and it {why}", param=f"{PREFIX}{name}")
