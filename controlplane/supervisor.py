"""Keeps the processes of one machine running: restarts what dies, gives up on what cannot start, stops all in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

from controlplane.child_process import ChildProcess, ChildSpec, log_tail
from controlplane.errors import Unavailable

__all__ = ["ChildFailed", "Report", "RestartPolicy", "Supervisor"]

Report = Callable[[str, str], None]
"""Called with a child's name and a short text for a person. Must not block or raise."""

_SETTINGS_ARE_WRONG = 2
"""The exit code by which our services say that trying again is of no use."""

_STEADY_S = 30.0
"""A child that lived this long counts as recovered: its next failure is the first in a row."""

_KILL_GRACE_S = 2.0
"""Every stage of a stop gets at least this much, also when those before it used all the time."""

_LOG_LINES_SHOWN = 15


class ChildFailed(Unavailable):
    """A child ended again and again without ever having been ready."""


class RestartPolicy:
    """How long to wait before a restart, and when to give up. Pure; one per child."""

    def __init__(self, *, first_delay_s: float = 0.5, longest_delay_s: float = 30.0, attempts: int = 3) -> None:
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._attempts = attempts
        self._failures_in_a_row = 0
        self._ever_ready = False

    def ready(self) -> None:
        """The child has come to work: from now on it is restarted for ever."""
        self._ever_ready = True

    def delay_after(self, exit_code: int, lived_s: float) -> float | None:
        """Seconds until the restart; None gives up, which only a child that was never ready brings about."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if lived_s < _STEADY_S else 1
        hopeless = exit_code == _SETTINGS_ARE_WRONG or self._failures_in_a_row >= self._attempts
        if hopeless and not self._ever_ready:
            return None
        return float(min(self._longest_delay_s, self._first_delay_s * 2 ** min(self._failures_in_a_row - 1, 16)))


class Supervisor:
    """Owns a set of children. An async context manager: inside it they run, after it none is left.

    Its body is cancelled, and `ChildFailed` raised in its place, when a child cannot start. Leaving it, in any way,
    stops the children stage by stage, the highest first, each by SIGTERM and, when `drain_timeout_s` for all of them is
    over, by SIGKILL to its whole process group. `kill` makes that immediate.
    """

    def __init__(
        self,
        specs: Iterable[ChildSpec],
        log_dir: Path,
        report: Report,
        *,
        drain_timeout_s: float,
        restart_policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self._children = {
            spec.name: _Kept(ChildProcess(spec, log_dir / f"{spec.name}.log"), restart_policy()) for spec in specs
        }
        self._report = report
        self._drain_timeout_s = drain_timeout_s
        self._keepers: list[asyncio.Task[None]] = []
        self._body: asyncio.Task[object] | None = None
        self._cancels_of_others = 0
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._body = asyncio.current_task()
        assert self._body is not None
        self._cancels_of_others = self._body.cancelling()
        for name, kept in self._children.items():
            keeper = asyncio.create_task(self._keep(kept), name=f"keep {name}")
            keeper.add_done_callback(self._when_keeper_ends)
            self._keepers.append(keeper)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure, body, self._body = self._failure, self._body, None
        try:
            await self._stop()
        finally:
            self.kill()
            await asyncio.wait(self._keepers)
        # As in asyncio.timeout: our own cancellation becomes the failure, somebody else's stays a cancellation.
        if failure is not None and body is not None and body.uncancel() <= self._cancels_of_others:
            raise failure from None

    def pid(self, name: str) -> int:
        """The process id of a child; 0 while it is between two lives."""
        process = self._children[name].process
        return process.pid if process.running else 0

    def mark_ready(self, name: str, pid: int) -> None:
        """Says that this process of a child has come to work; said of an earlier one, it changes nothing."""
        kept = self._children[name]
        if pid and self.pid(name) == pid:
            kept.policy.ready()

    def kill(self) -> None:
        """Ends every child and what it started, at once. A stop under way then comes to its end."""
        for kept in self._children.values():
            kept.stopping.set()
            kept.process.kill()

    async def _keep(self, kept: _Kept) -> None:
        """Runs one child until it is told to stop or is given up."""
        name, process = kept.process.spec.name, kept.process
        try:
            while not kept.stopping.is_set():
                started = time.monotonic()
                await process.start()
                if kept.stopping.is_set():  # told while the process was being made
                    process.terminate()
                exit_code = await process.wait()
                if kept.stopping.is_set():
                    return
                delay_s = kept.policy.delay_after(exit_code, time.monotonic() - started)
                if delay_s is None:
                    tail = "\n".join(f"    {line}" for line in log_tail(process.log_file, _LOG_LINES_SHOWN))
                    raise ChildFailed(f"{name} cannot start: it {_how_it_ended(exit_code)}. Its log ends:\n{tail}")
                self._report(name, f"{_reason(process, exit_code)}; restarting in {delay_s:.1f} s")
                await _wait_at_most(kept.stopping.wait(), delay_s)
        finally:
            kept.ended.set()

    def _when_keeper_ends(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and keeper.exception() is not None and self._failure is None:
            self._failure = keeper.exception()
            if self._body is not None:
                self._body.cancel()

    async def _stop(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        by_stage = sorted(self._children.values(), key=lambda kept: -kept.process.spec.stage)
        for _, stage in groupby(by_stage, key=lambda kept: kept.process.spec.stage):
            children = list(stage)
            for kept in children:
                kept.stopping.set()
                kept.process.terminate()
            time_left_s = deadline - asyncio.get_running_loop().time()
            all_ended = asyncio.gather(*(kept.ended.wait() for kept in children))
            if not await _wait_at_most(all_ended, max(time_left_s, _KILL_GRACE_S)):
                for kept in children:
                    if not kept.ended.is_set():
                        self._report(kept.process.spec.name, "did not stop in time; killed")
                        kept.process.kill()
                await asyncio.gather(*(kept.ended.wait() for kept in children))


class _Kept:
    """A child and what its keeper knows of it."""

    def __init__(self, process: ChildProcess, policy: RestartPolicy) -> None:
        self.process = process
        self.policy = policy
        self.stopping = asyncio.Event()
        self.ended = asyncio.Event()


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _reason(process: ChildProcess, exit_code: int) -> str:
    last_line = log_tail(process.log_file, 1)
    return _how_it_ended(exit_code) + (f" ({last_line[0].strip()})" if last_line else "")


async def _wait_at_most(awaitable: Awaitable[object], timeout_s: float) -> bool:
    """Whether it came about in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await awaitable
    except TimeoutError:
        return False
    return True
