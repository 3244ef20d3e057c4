"""Makes a planned fault happen, and undoes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from cli.chaos.checker import LEAVING
from cli.chaos.links import Link, State
from cli.chaos.load import Load
from cli.chaos.plan import Fault, Strike
from cli.chaos.suite import Suite
from controlplane.errors import TokenmillError

__all__ = ["Striker", "Struck"]

_AFTERMATH_S = 2.0
"""What a fault brought about may still be met so long after its part is well again: others must hear of it."""
_BURST = 64
_ENDING = ("kill", "empty", "stop")
"""The process that was met ends; well is the one after it."""
_LINK_STATES = {
    "away": State.SHUT,
    "cut-off": State.MUTE,
    "mute": State.MUTE,
    "slow": State.SLOW,
    "delay": State.DELAYED,
}


@dataclass(slots=True)
class Struck:
    """A fault that happened."""

    name: str
    role: str
    part: str
    gentle: bool
    began: float
    streams: int
    """Answers that were coming at that moment."""
    over: float | None = None
    """When the fault itself was gone."""
    well: float | None = None
    """When its part was at work again; None: not in time, or not yet."""

    def at_work(self, since: float, until: float) -> bool:
        """Whether it can have been met between these times."""
        return self.began <= until and (self.well is None or since <= self.well + _AFTERMATH_S)


class Striker:
    """Keeps the book of what happened."""

    def __init__(self, suite: Suite, load: Load, recovery_s: float, say: Callable[[str], None]) -> None:
        self.struck: list[Struck] = []
        self.unrecovered: list[str] = []
        self._suite = suite
        self._load = load
        self._recovery_s = recovery_s
        self._say = say

    def disturbed(self, since: float, until: float) -> set[str]:
        """The roles that faults were at work on between these times."""
        return {
            LEAVING if one.gentle and one.role == "frontend" else one.role
            for one in self.struck
            if one.at_work(since, until)
        }

    async def strike(self, strike: Strike) -> None:
        """From the fault's beginning until its part is well again."""
        fault, part = strike.fault, strike.part
        struck = Struck(fault.name, fault.role, part, fault.gentle, time.monotonic(), self._load.streams())
        pid = self._suite.supervisor.pid(part) if fault.action in _ENDING else 0
        self.struck.append(struck)
        self._say(f"{fault.name}: {part}" + (f" for {strike.lasts_s:.1f} s" if strike.lasts_s else ""))
        try:
            async with self._spoilt(fault.action, part):
                await asyncio.sleep(strike.lasts_s)
            struck.over = time.monotonic()
            await self._until_well(fault, part, pid)
            struck.well = time.monotonic()
        except TokenmillError as error:
            self.unrecovered.append(f"{fault.name} of {part}: {error.message}")

    async def _until_well(self, fault: Fault, part: str, pid: int) -> None:
        concerned = self._concerned(fault.role, part)
        restart = asyncio.create_task(self._bring_back(fault.action, part))
        try:
            await self._suite.until_well(concerned, self._recovery_s, {part: pid})
            await restart
        finally:
            restart.cancel()

    async def _bring_back(self, action: str, part: str) -> None:
        """Starts again what ends in order, and would stay away."""
        if action == "stop" or (action == "drain" and not await self._suite.undrain(part)):
            await self._suite.supervisor.restart(part)

    def _concerned(self, role: str, part: str) -> list[str]:
        if role == "clients":
            return []
        return self._suite.everybody if role in ("etcd", "nats") else [part]

    @asynccontextmanager
    async def _spoilt(self, action: str, part: str) -> AsyncIterator[None]:
        match action:
            case "kill":
                self._signal(part, signal.SIGKILL)
                yield
            case "empty":
                self._signal(part, signal.SIGKILL)
                await asyncio.to_thread(shutil.rmtree, self._suite.folder / "data" / part, True)
                yield
            case "freeze":
                pid = self._signal(part, signal.SIGSTOP)
                try:
                    yield
                finally:
                    _signal_group(pid, signal.SIGCONT)
            case "hang":
                pid = self._signal(part, signal.SIGUSR1)
                try:
                    yield
                finally:
                    _signal_group(pid, signal.SIGUSR2)
            case "drain":
                await self._suite.drain(part)
                yield
            case "stop":
                yield
            case "no-files":
                with self._limited(part, resource.RLIMIT_NOFILE):
                    yield
            case "disk-full":
                with self._limited(part, resource.RLIMIT_FSIZE):
                    yield
            case "hang-up":
                self._load.hang_up()
                yield
            case "burst":
                self._load.burst(_BURST)
                yield
            case "reset":
                for link in self._links(action, part):
                    link.reset()
                yield
            case _:
                async with AsyncExitStack() as spoilt:
                    for link in self._links(action, part):
                        await spoilt.enter_async_context(link.spoilt(_LINK_STATES[action]))
                    yield

    def _links(self, action: str, part: str) -> list[Link]:
        """Those that lead to a part; of one cut off, those that it itself uses."""
        links = self._suite.links
        if action == "cut-off":
            return [links[f"{server} of {part}"] for server in ("etcd", "nats")]
        return [link for name, link in links.items() if name == part or name.startswith(f"{part} of ")]

    def _signal(self, part: str, number: signal.Signals) -> int:
        """To its whole process group; returns its process id, 0 between two lives."""
        pid = self._suite.supervisor.pid(part)
        _signal_group(pid, number)
        return pid

    @contextmanager
    def _limited(self, part: str, limit: int) -> Iterator[None]:
        """Takes a limit of a running process down to what it already uses."""
        pid = self._suite.supervisor.pid(part)
        if not pid:  # between two lives
            yield
            return
        before = resource.prlimit(pid, limit)
        used = len(os.listdir(f"/proc/{pid}/fd")) if limit == resource.RLIMIT_NOFILE else 0
        resource.prlimit(pid, limit, (used, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, limit, before)


def _signal_group(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
