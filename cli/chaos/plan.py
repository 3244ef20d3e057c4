"""Which faults strike whom and when. Pure: the same seed and parts, the same plan."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import SettingsError

__all__ = ["FAULTS", "Fault", "Parts", "Strike", "chosen", "dealt", "plan_round"]

Parts = Mapping[str, Sequence[str]]
"""Role ("decode", "etcd", ...) -> names of the processes in it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way for a part to go wrong."""

    action: str
    role: str
    longest_s: float = 0.0
    """Of a fault that lasts; 0: it is over at once."""
    shortest_s: float = 1.0
    network: bool = False
    """Needs a link of ours before each service, see `links.py`."""

    gentle: bool = False
    """Nobody may notice."""

    @property
    def name(self) -> str:
        """As --faults and the report have it."""
        return f"{self.action}-{self.role}"


_WORKERS = ("prefill", "decode")
_SERVICES = (*_WORKERS, "router", "frontend")
_SERVERS = ("etcd", "nats")

FAULTS = (
    *(Fault("kill", role) for role in (*_SERVICES, *_SERVERS)),
    *(Fault("freeze", role, 8.0) for role in (*_SERVICES, *_SERVERS)),
    *(Fault("away", role, 6.0, 4.0) for role in _SERVERS),
    Fault("empty", "etcd"),
    *(Fault("cut-off", role, 6.0) for role in _SERVICES),
    *(Fault(action, role, 5.0, network=True) for action in ("mute", "slow") for role in (*_WORKERS, "router")),
    *(Fault("delay", role, 5.0) for role in _SERVERS),
    *(Fault("reset", role, network=True) for role in (*_WORKERS, "router")),
    *(Fault("reset", role) for role in _SERVERS),
    *(Fault("no-files", role, 4.0) for role in _SERVICES),
    *(Fault("disk-full", role, 4.0) for role in (*_SERVICES, "etcd")),
    *(Fault("hang", role, 8.0, 4.0) for role in _WORKERS),
    *(Fault("stop", role, gentle=True) for role in _SERVICES),
    *(Fault("drain", role, 5.0, gentle=True) for role in _SERVICES),
    Fault("hang-up", "clients"),
    Fault("burst", "clients"),
)
"""`away`: nobody listens there. `empty`: restarted without its data. `cut-off`: etcd and NATS are silent to this one
part. `mute`: connections to it stay open and carry nothing. `no-files`: no further file descriptor. `hang`: its engine
makes no step. `stop`: SIGTERM. `drain`: undrained afterwards. `hang-up`: all clients at once. `burst`: many new
clients at once."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that meets a part at a time."""

    fault: Fault
    part: str
    after_s: float
    """From the beginning of the round."""
    lasts_s: float

    @property
    def until_s(self) -> float:
        """When it is over."""
        return self.after_s + self.lasts_s


def chosen(patterns: str, parts: Parts) -> tuple[Fault, ...]:
    """The faults that a comma separated list of names or patterns asks for, as far as there are parts to meet.

    Raises `SettingsError` for one that fits none.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(fault.name, pattern) for fault in FAULTS):
            names = ", ".join(fault.name for fault in FAULTS)
            raise SettingsError(f"--faults: no fault is called {pattern!r}; there are: {names}", param="faults")
    return tuple(
        fault
        for fault in FAULTS
        if any(fnmatch.fnmatchcase(fault.name, pattern) for pattern in wanted)
        and parts.get(fault.role)
        # Without a second one its clients have nowhere to go.
        and not (fault.role == "frontend" and len(parts["frontend"]) < 2)
    )


def dealt(choose: random.Random, faults: Sequence[Fault]) -> Iterator[Fault]:
    """Faults without end: each once, in any order, then each once more."""
    while True:
        yield from choose.sample(list(faults), len(faults))


def plan_round(
    choose: random.Random, faults: Iterator[Fault], parts: Parts, *, strikes: int, spacing_s: float
) -> list[Strike]:
    """Strikes in the order of their times, about `spacing_s` apart, some while the one before lasts.

    No part is struck twice at once. Of each role that has two or more parts, one at least is well at any time, with
    time to recover in between.
    """
    planned: list[Strike] = []
    at_s = choose.uniform(0.5, 1.5)
    for _ in range(strikes):
        fault = next(faults)
        part = choose.choice(list(parts[fault.role]))
        lasts_s = choose.uniform(min(fault.shortest_s, fault.longest_s), fault.longest_s)
        at_s = max([at_s, *(one.until_s for one in planned if one.part == part)])
        others = [one for one in planned if one.fault.role == fault.role and one.part != part]
        if len(parts[fault.role]) > 1 and others:
            at_s = max(at_s, max(one.until_s for one in others) + spacing_s)
        planned.append(Strike(fault, part, round(at_s, 3), round(lasts_s, 3)))
        at_s += choose.choice((0.3, 1.0, 1.7)) * spacing_s
    return planned
