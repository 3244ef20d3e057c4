"""The `tokenmill` command as a user has it, for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from pathlib import Path

_TIMEOUT_S = 120


class Tokenmill:
    """The command line as a user has it, in a temporary folder of its own by which all it starts can be told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        self._env = ours | {"TMPDIR": str(folder), "STARTED_BY": str(folder)}
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            self._command(arguments), env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, *arguments: str) -> Running:
        """Starts a command, as a terminal would: in a process group that Ctrl-C can be sent to."""
        log = self.folder.parent / f"{self.folder.name}-{len(self._started)}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                self._command(arguments), env=self._env, stdout=out, stderr=out, text=True, start_new_session=True
            )
        self._started.append(process)
        return Running(process, log)

    def processes(self) -> dict[int, str]:
        """Everything alive that was started from here, however deep: pid -> command line."""
        mark = f"STARTED_BY={self.folder}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, part_of_command: str) -> int:
        """The process whose command line has this in it."""
        (pid,) = (pid for pid, command in self.processes().items() if part_of_command in command)
        return pid

    def assert_nothing_left(self, *ports: int, of_libraries: Collection[str] = ()) -> None:
        """No process, folder or listening port; files that match `of_libraries` are not ours."""
        assert self.processes() == {}
        left = [path.name for path in self.folder.iterdir()]
        assert [name for name in left if not any(fnmatch(name, pattern) for pattern in of_libraries)] == []
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    def close(self) -> None:
        """Ends what a failed test left."""
        for process in self._started:
            process.kill()
            process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _command(arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "cli.main", *arguments]


class Running:
    """A command that runs, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> str:
        """Waits until it has said this; returns all it said."""
        eventually(lambda: text in self.said or self.process.poll() is not None)
        assert text in self.said, self.said
        return self.said

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = 60) -> int:
        return self.process.wait(timeout_s)


def eventually(condition: Callable[[], object], timeout_s: float = _TIMEOUT_S) -> None:
    """Waits until it is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
