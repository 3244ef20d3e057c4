"""One child of a supervisor, over all its lives."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from enum import Enum

from controlplane.child_log import log_tail
from controlplane.child_process import ChildProcess
from controlplane.restart_policy import RestartPolicy

__all__ = ["Child", "ChildState", "KeptChild", "how_it_ended", "reason"]


class ChildState(Enum):
    """Values are those of supervisor.proto."""

    RUNNING = 1
    RESTARTING = 2
    """It ended and is started again soon."""
    STOPPED = 3
    """It was asked to go."""


@dataclass(frozen=True, slots=True)
class Child:
    """One child as it is now."""

    name: str
    state: ChildState
    pid: int
    """0: there is no process."""
    instance_id: str


class KeptChild:
    """A child and what its keeper knows of it. What is of one life only begins anew with the next."""

    def __init__(self, process: ChildProcess, policy: RestartPolicy) -> None:
        self.process = process
        self.policy = policy
        self.keeper: asyncio.Task[None] | None = None
        self.state = ChildState.RUNNING
        self.stopping = False
        self.woken = asyncio.Event()
        """It is to stop, or to live again at once."""
        self.ended = asyncio.Event()
        """Its last life is over."""
        self.ready = asyncio.Event()
        self.over = asyncio.Event()
        """This life is."""
        self._failure: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int:
        """0 between two lives."""
        return self.process.pid if self.process.running else 0

    @property
    def again(self) -> bool:
        """It is to live again at once."""
        return self.woken.is_set() and not self.stopping

    @property
    def failure(self) -> asyncio.Future[str]:
        """Why this life, or the next one where it has not begun, ended without being asked to."""
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    def begin(self) -> None:
        """Another life begins."""
        self.state = ChildState.RUNNING
        for event in (self.woken, self.ready, self.over):
            event.clear()
        if self.failure.done():
            self._failure = None

    def failed(self, reason: str) -> None:
        """This life ended without being asked to; the first reason counts."""
        if not self.failure.done():
            self.failure.set_result(reason)

    def stop(self) -> None:
        """No life is to follow this one."""
        self.stopping = True
        self.woken.set()

    def wake(self) -> None:
        """When this life is over, or if it is, another is to follow at once."""
        if self.failure.done():
            self._failure = None
        self.woken.set()


def how_it_ended(exit_code: int) -> str:
    """In words."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def reason(process: ChildProcess, exit_code: int) -> str:
    """How it ended, and the last it said."""
    last_line = log_tail(process.log_file, 1)
    return how_it_ended(exit_code) + (f" ({last_line[0].strip()})" if last_line else "")
