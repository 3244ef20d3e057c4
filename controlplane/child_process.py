"""One child process: its own session, a log file, sockets it is given, and an end no later than its parent's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from controlplane.listen_fds import FIRST_FD

__all__ = ["INSTANCE_ID_ENV", "ChildProcess", "ChildSpec", "die_with_parent"]

INSTANCE_ID_ENV = "TOKENMILL_INSTANCE_ID"

# Runs first in the child, then becomes the command. Not a preexec_fn: that runs Python between fork and exec, which may
# deadlock in a process with threads, and gRPC has threads.
_DIE_WITH_PARENT = f"""
import ctypes, fcntl, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))  # PR_SET_PDEATHSIG; survives the exec
given = [int(descriptor) for descriptor in sys.argv[3].split(",") if descriptor]
aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in given]
for descriptor in given:
    os.set_inheritable(descriptor, False)
for number, descriptor in enumerate(aside, {FIRST_FD}):
    os.dup2(descriptor, number)
if given:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(given)))
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[4], sys.argv[4:])
"""


def die_with_parent(command: Sequence[str], death_signal: signal.Signals, sockets: Sequence[int] = ()) -> list[str]:
    """`command`, wrapped so that Linux sends it `death_signal` when the thread that started it ends, in any way.

    It gets the `sockets`, descriptors that the wrapper must inherit, as `inherited_sockets` expects them.
    """
    given = ",".join(map(str, sockets))
    return [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(int(death_signal)), str(os.getpid()), given, *command]


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
    retire_signal: signal.Signals = signal.SIGTERM
    """What it gets when its successor has taken its place, and nobody is in a hurry."""
    instance_id: str = ""
    """What a service registers as; empty: it is none."""
    generation: int = 1
    sockets: tuple[int, ...] = ()
    """Descriptors of listening sockets that it is given, and shares with those before and after it."""
    answers: Callable[[], bool] | None = None
    """Whether it has come to work, for one that is no service; may block for a moment."""

    def successor(self) -> ChildSpec:
        """The same service as another instance, to run beside this one: after `decode-4f2a1c` `decode-4f2a1c-2`."""
        generation = self.generation + 1
        first_id = self.instance_id if self.generation == 1 else self.instance_id.rpartition("-")[0]
        instance_id = f"{first_id}-{generation}"
        env = {**(os.environ if self.env is None else self.env), INSTANCE_ID_ENV: instance_id}
        return replace(self, generation=generation, instance_id=instance_id, env=env)


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
        spec = self.spec
        with contextlib.ExitStack() as stack:
            try:
                log: int | IO[bytes] = stack.enter_context(self.log_file.open("ab"))
            except OSError:  # no room for a log is no reason not to serve
                log = subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(spec.command, spec.death_signal, spec.sockets),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=spec.env,
                pass_fds=spec.sockets,
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
        self._send(signal.SIGTERM)

    def retire(self) -> None:
        """Asks it, and it alone, to finish what it has and go."""
        self._send(self.spec.retire_signal)

    def _send(self, number: signal.Signals) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and all processes of its group at once."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
