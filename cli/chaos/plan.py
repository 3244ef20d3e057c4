"""Which faults strike whom and when. Pure: the same seed and parts, the same plan."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import SettingsError

__all__ = ["EFFECTS", "FAULTS", "Fault", "Parts", "Strike", "chosen", "dealt", "plan_round"]

Parts = Mapping[str, Sequence[str]]
"""Role ("decode", "etcd", ...) -> names of the processes in it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way for a part to go wrong; docs/reliability.md says what each action is."""

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
EFFECTS = {
    "kill": "nothing; the answer goes on on another worker",
    "kill-prefill": "nothing; the prompt is computed again",
    "kill-router": "nothing; another router decides, or the frontend itself",
    "kill-frontend": "its connections break; the next request goes to another frontend",
    "kill-etcd": "nothing; everyone keeps the last picture",
    "kill-nats": "nothing; routers know less until it is back",
    "freeze": "one wait, until the silence is noticed; then the answer goes on elsewhere",
    "freeze-router": "nothing but a moment; another router decides, or the frontend itself",
    "freeze-frontend": "a wait as long as the fault",
    "freeze-etcd": "nothing",
    "freeze-nats": "nothing",
    "away": "nothing; services know less until it is back",
    "empty": "nothing; everyone registers again under the same id",
    "cut-off": "nothing; it serves on with the last picture",
    "mute": "one wait, until the silence is noticed; then the answer goes on elsewhere",
    "mute-router": "nothing but a moment; another router decides, or the frontend itself",
    "slow": "a slower answer",
    "delay": "nothing",
    "reset": "nothing; the answer goes on",
    "no-files": "nothing",
    "no-files-frontend": "new connections wait",
    "disk-full": "nothing",
    "hang": "one wait, until the hang is noticed; then the answer goes on elsewhere",
    "stop": "nothing",
    "drain": "nothing",
    "hang-up": "nothing: they are gone, and all that was done for them ends",
    "burst": "a longer wait for the first token, or 429 with a time to come back",
}
"""What a client sees, by a fault's name or its action."""


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
    choose: random.Random, faults: Iterator[Fault], parts: Parts, *, strikes: int, spacing_s: float, apart: bool = False
) -> list[Strike]:
    """Strikes in the order of their times, about `spacing_s` apart, some while the one before lasts.

    No part is struck twice at once. Of each role that has two or more parts, one at least is well at any time, with
    time to recover in between. `apart`: each is over, and `spacing_s` more, before the next.
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
        at_s = planned[-1].until_s + spacing_s if apart else at_s + choose.choice((0.3, 1.0, 1.7)) * spacing_s
    return planned
