"""One child process: its own session, a log file, and an end no later than its parent's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChildProcess", "ChildSpec", "die_with_parent", "log_tail"]

# Runs first in the child, then becomes the command. Not a preexec_fn: that runs Python between fork and exec, which may
# deadlock in a process with threads, and gRPC has threads.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))  # PR_SET_PDEATHSIG; survives the exec
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def die_with_parent(command: Sequence[str], death_signal: signal.Signals) -> list[str]:
    """`command`, wrapped so that Linux sends it `death_signal` when the thread that started it ends, in any way."""
    return [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(int(death_signal)), str(os.getpid()), *command]


def log_tail(log_file: Path, lines: int) -> list[str]:
    """The last lines of a log that say something, at most `lines`; empty when there is no log.

    A Go program (etcd, NATS) that panics ends in a long trace; why it did stands before that, so the trace is left out.
    """
    with contextlib.suppress(FileNotFoundError), log_file.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 65536))
        said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [
            line
            for line, next_line in zip(said, [*said[1:], ""], strict=True)
            if not line.startswith(("\t", "goroutine ")) and not next_line.startswith("\t")
        ]
        return telling[-lines:]
    return []


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run, and when to stop it."""

    name: str
    """For people, and its log file's name; unique within a supervisor."""
    command: tuple[str, ...]
    stage: int = 0
    """Higher stages are stopped first, and have ended before a lower one is told to stop."""
    env: Mapping[str, str] | None = None
    """The whole environment; None: the supervisor's own."""
    death_signal: signal.Signals = signal.SIGTERM
    """What the child gets when its supervisor is gone."""


class ChildProcess:
    """Runs a `ChildSpec`, any number of times one after the other."""

    def __init__(self, spec: ChildSpec, log_file: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the present process, or of the last one; 0 before the first."""
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process as the leader of a session of its own, so that a terminal's Ctrl-C does not reach it."""
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(self.spec.command, self.spec.death_signal),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.spec.env,
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. What it started in its own session ends with it."""
        assert self._process is not None
        try:
            return await self._process.wait()
        finally:
            if not self.running:
                self.kill()

    def terminate(self) -> None:
        """Asks it, and it alone, to stop in order."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all processes of its group at once."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
