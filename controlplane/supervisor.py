"""Keeps the processes of one machine running: restarts what dies, gives up on what cannot start, stops all in order.

A child that ends with exit code 0 was asked to go, and stays down until `restart`. A service that runs can be followed
by a successor, another instance of the same child beside which it runs until the successor is ready.
"""

from __future__ import annotations

import asyncio
import difflib
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane.child_log import log_tail, rotate
from controlplane.child_process import ChildProcess, ChildSpec
from controlplane.errors import NotFound, Unavailable
from controlplane.kept_child import Child, ChildState, KeptChild, how_it_ended, reason
from controlplane.restart_policy import RestartPolicy

__all__ = ["ChildFailed", "Report", "Supervisor"]

Report = Callable[[str, str], None]
"""Called with a child's name and a short text for a person. Must not block or raise."""

_KILL_GRACE_S = 2.0
"""Every stage of a stop gets at least this much, also when those before it used all the time."""

_LONGEST_RETIREMENT_S = 3600.0
_LOG_LINES_SHOWN = 15
_MAX_LOG_BYTES = 25 << 20
"""Twice this is kept of each child's log."""
_LOOK_AT_LOGS_S = 1.0
_ASK_S = 0.05
"""Pause between two tries to have an answer of a child that has just started."""


class ChildFailed(Unavailable):
    """A child ended again and again without ever having been ready."""


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
        start_timeout_s: float = 3600.0,
        restart_policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self._log_dir = log_dir
        self._report = report
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._children = {spec.name: self._kept(spec, restart_policy()) for spec in specs}
        """By name, the one that counts."""
        self._all: set[KeptChild] = set()
        """With those that come after and those that go."""
        self._restarting = asyncio.Lock()
        self._restarts: set[asyncio.Task[None]] = set()
        self._log_watch: asyncio.Task[None] | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancels_of_others = 0
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._body = asyncio.current_task()
        assert self._body is not None
        self._cancels_of_others = self._body.cancelling()
        self._log_watch = asyncio.create_task(self._bound_logs(), name="bound logs")
        for kept in self._children.values():
            self._start(kept).add_done_callback(self._when_keeper_ends)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure, body, self._body = self._failure, self._body, None
        assert self._log_watch is not None
        for task in (*self._restarts, self._log_watch):
            task.cancel()
        try:
            await self._stop()
        finally:
            self.kill()
            keepers = [kept.keeper for kept in self._all if kept.keeper is not None]
            await asyncio.gather(*keepers, *self._restarts, self._log_watch, return_exceptions=True)
        # As in asyncio.timeout: our own cancellation becomes the failure, somebody else's stays a cancellation.
        if failure is not None and body is not None and body.uncancel() <= self._cancels_of_others:
            raise failure from None

    def children(self) -> list[Child]:
        """All, in the order in which they were given."""
        return [
            Child(name, kept.state, kept.pid, kept.process.spec.instance_id) for name, kept in self._children.items()
        ]

    def pid(self, name: str) -> int:
        """The process id of a child; 0 while it has no process."""
        return self._children[name].pid

    def pids(self) -> dict[str, tuple[str, int]]:
        """Name and process id of every service by its instance id, successors included."""
        return {
            kept.process.spec.instance_id: (kept.process.spec.name, kept.pid)
            for kept in self._all
            if kept.process.spec.instance_id and kept.pid
        }

    def mark_ready(self, name: str, pid: int) -> None:
        """Says that this process of a child has come to work; said of one that is gone, it changes nothing."""
        for kept in self._all:
            if pid and kept.pid == pid and kept.process.spec.name == name:
                kept.policy.ready()
                kept.ready.set()

    async def until_ready(self, name: str) -> None:
        """Waits, without end, until the child works."""
        await self._children[name].ready.wait()

    async def restart(self, name: str, *, successor_first: bool = False) -> Child:
        """Brings back a child that is down, and has one that runs go and come back; returns when it works again.

        With `successor_first` a service is told to go only when its successor is ready. Goes on when it is cancelled.
        Raises `NotFound`, or `Unavailable` with the reason why the new process does not come to work.
        """
        if name not in self._children:
            nearest = difflib.get_close_matches(name, self._children, n=1, cutoff=0.0)
            raise NotFound(f"no child is called {name!r}; the nearest is {nearest[0]!r}", param="name")
        task = asyncio.create_task(self._restart(name, successor_first), name=f"restart {name}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable(f"{name} is not restarted: the deployment is stopping") from None
            raise
        return next(child for child in self.children() if child.name == name)

    def kill(self) -> None:
        """Ends every child and what it started, at once. A stop under way then comes to its end."""
        for kept in self._all:
            kept.stop()
            kept.process.kill()

    def _kept(self, spec: ChildSpec, policy: RestartPolicy) -> KeptChild:
        return KeptChild(ChildProcess(spec, self._log_dir / f"{spec.name}.log"), policy)

    def _start(self, kept: KeptChild) -> asyncio.Task[None]:
        self._all.add(kept)
        kept.keeper = asyncio.create_task(self._keep(kept), name=f"keep {kept.process.spec.name}")
        return kept.keeper

    async def _keep(self, kept: KeptChild) -> None:
        """Runs one child until it is told to stop or is given up."""
        name, process = kept.process.spec.name, kept.process
        try:
            while not kept.stopping:
                started = time.monotonic()
                exit_code, reason = await self._live(kept)
                if kept.stopping:
                    return
                if kept.again:
                    continue
                if exit_code == 0:
                    kept.state = ChildState.STOPPED
                    self._report(name, f"was asked to go; `tokenmill restart {name}` brings it back")
                    await kept.woken.wait()
                    continue
                kept.state = ChildState.RESTARTING
                delay_s = kept.policy.delay_after(exit_code, time.monotonic() - started)
                if delay_s is None:
                    tail = "\n".join(f"    {line}" for line in log_tail(process.log_file, _LOG_LINES_SHOWN))
                    message = f"{name} cannot start: it {how_it_ended(exit_code)}. Its log ends:\n{tail}"
                    kept.failed(message)
                    raise ChildFailed(message)
                kept.failed(f"{name} {reason}")
                self._report(name, f"{reason}; restarting in {delay_s:.1f} s")
                await _wait_at_most(kept.woken.wait(), delay_s)
        finally:
            kept.failed(f"{name} was stopped")
            kept.ended.set()

    async def _live(self, kept: KeptChild) -> tuple[int, str]:
        """One life of a child: its exit code, and how it ended in words."""
        kept.begin()
        process = kept.process
        try:
            await process.start()
        except OSError as error:  # no memory, no descriptors: that may pass
            return 1, f"cannot be started: {error.strerror or error}"
        if kept.stopping:  # told while the process was being made
            process.terminate()
        asking = asyncio.create_task(self._ask(kept), name="ask whether it answers")
        try:
            exit_code = await process.wait()
        finally:
            kept.ready.clear()
            kept.over.set()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return exit_code, reason(process, exit_code)

    async def _ask(self, kept: KeptChild) -> None:
        answers = kept.process.spec.answers
        if answers is not None:
            while not await asyncio.to_thread(answers):  # noqa: ASYNC110  another process makes it true
                await asyncio.sleep(_ASK_S)
            self.mark_ready(kept.process.spec.name, kept.pid)

    async def _restart(self, name: str, successor_first: bool) -> None:
        async with self._restarting:
            kept = self._children[name]
            if successor_first and kept.process.running and kept.process.spec.instance_id:
                await self._succeed(kept)
                return
            kept.wake()
            if kept.process.running:
                self._report(name, "restarts, as asked")
                kept.process.terminate()
                await self._ended_in_time(kept, kept.over, self._drain_timeout_s)
            await self._becomes_ready(kept)

    async def _succeed(self, old: KeptChild) -> None:
        spec = old.process.spec
        new = self._kept(spec.successor(), RestartPolicy(attempts=1))
        self._report(spec.name, f"{new.process.spec.instance_id} starts, to take the place of {spec.instance_id}")
        keeper = self._start(new)
        try:
            await self._becomes_ready(new)
        except BaseException:
            new.stop()
            new.process.kill()
            await asyncio.gather(keeper, return_exceptions=True)
            self._all.discard(new)
            self._report(spec.name, f"{new.process.spec.instance_id} did not come to work; {spec.instance_id} goes on")
            raise
        keeper.add_done_callback(self._when_keeper_ends)
        self._children[spec.name] = new
        self._report(spec.name, f"{new.process.spec.instance_id} is ready, {spec.instance_id} goes")
        old.stop()
        old.process.retire()
        patient = spec.retire_signal is not signal.SIGTERM
        await self._ended_in_time(old, old.ended, _LONGEST_RETIREMENT_S if patient else self._drain_timeout_s)
        self._all.discard(old)

    async def _ended_in_time(self, kept: KeptChild, ended: asyncio.Event, timeout_s: float) -> None:
        """Waits for one that was told to go, and kills it when it takes too long."""
        if not await _wait_at_most(ended.wait(), timeout_s):
            self._report(kept.process.spec.name, "did not stop in time; killed")
            kept.process.kill()
            await ended.wait()

    async def _becomes_ready(self, kept: KeptChild) -> None:
        """Raises `Unavailable` when this life of it ends before, or takes too long."""
        ready = asyncio.create_task(kept.ready.wait(), name="ready")
        try:
            ends: tuple[asyncio.Future[Any], ...] = (ready, failure := kept.failure)
            await asyncio.wait(ends, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                late = f"{kept.process.spec.name} is not ready after {self._start_timeout_s:g} s"
                raise Unavailable(failure.result() if failure.done() else late)
        finally:
            ready.cancel()

    def _when_keeper_ends(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and keeper.exception() is not None and self._failure is None:
            self._failure = keeper.exception()
            if self._body is not None:
                self._body.cancel()

    async def _stop(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        by_stage = sorted(self._all, key=lambda kept: -kept.process.spec.stage)
        for _, stage in groupby(by_stage, key=lambda kept: kept.process.spec.stage):
            children = list(stage)
            for kept in children:
                kept.stop()
                kept.process.terminate()
            time_left_s = deadline - asyncio.get_running_loop().time()
            all_ended = asyncio.gather(*(kept.ended.wait() for kept in children))
            if not await _wait_at_most(all_ended, max(time_left_s, _KILL_GRACE_S)):
                for kept in children:
                    if not kept.ended.is_set():
                        self._report(kept.process.spec.name, "did not stop in time; killed")
                        kept.process.kill()
                await asyncio.gather(*(kept.ended.wait() for kept in children))

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_AT_LOGS_S)
            for log in self._log_dir.glob("*.log"):  # this process's own may be there, too
                try:
                    await asyncio.to_thread(rotate, log, _MAX_LOG_BYTES)
                except OSError as error:
                    self._report(log.stem, f"its log cannot be bounded: {error.strerror or error}")


async def _wait_at_most(awaitable: Awaitable[object], timeout_s: float) -> bool:
    """Whether it came about in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await awaitable
    except TimeoutError:
        return False
    return True
