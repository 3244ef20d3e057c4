"""The folder of a deployment that runs on this machine: who runs it, where it answers, its logs and data.

    <temporary folder>/tokenmill-<uid>/<deployment>.lock     locked by the supervisor as long as it lives
    <temporary folder>/tokenmill-<uid>/<deployment>/         state.json, supervisor.sock, logs, etcd and NATS data

The kernel drops the lock when its process ends, however it ends: a folder without one is left over, and is removed by
whoever finds it. Process ids, which the kernel gives out again, decide nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from controlplane.errors import SettingsError, Unavailable

__all__ = ["DeploymentState", "RunFolder", "run_folder", "running"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLAIM_TIMEOUT_S = 1.0


class DeploymentState(msgspec.Struct, frozen=True):
    """What others on this machine need to find and to stop a running deployment."""

    deployment: str
    pid: int
    """The supervisor's; SIGTERM stops all in order."""
    etcd: str
    nats: str
    url: str = ""
    """Of the OpenAI HTTP API; empty until a request has been served."""


class RunFolder:
    """A deployment's folder, claimed by this process until `remove` or, after a fork, by the child from `leave` on."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def claim(cls, deployment: str) -> RunFolder:
        """Makes the folder anew. Raises `Unavailable` when the deployment already runs here."""
        base = _base()
        deadline = time.monotonic() + _CLAIM_TIMEOUT_S
        # Somebody who looks whether a deployment runs holds its lock for a moment, too.
        while (lock := _try_lock(base, deployment)) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"deployment {deployment!r} already runs on this machine ({_whereabouts(deployment)}); stop it "
                    f"with `tokenmill down --deployment {deployment}`, or start another with --deployment NAME"
                )
            time.sleep(0.02)
        path = base / deployment
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        return cls(path, lock)

    def publish(self, state: DeploymentState) -> None:
        """Makes the state visible to `running`, whole or not at all."""
        fresh = self.path / "state.json.new"
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.rename(self.path / "state.json")

    def remove(self) -> None:
        """Gives the name free and leaves nothing on disk. Does nothing once it was left."""
        if self._lock is not None:
            _remove(self.path, self._lock)
            self._lock = None

    def leave(self) -> None:
        """Leaves the folder to the process forked from this one, which holds the same lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def run_folder(deployment: str) -> Path:
    """Where a deployment on this machine has its folder, whether or not it runs."""
    return _base() / deployment


def running(deployment: str) -> DeploymentState | None:
    """The state of a deployment on this machine; None when it does not run. Cleans up after a supervisor that died."""
    base = _base()
    if not _lock_path(base, deployment).exists():
        return None
    lock = _try_lock(base, deployment)
    if lock is not None:
        _remove(base / deployment, lock)
        return None
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode((base / deployment / "state.json").read_bytes(), type=DeploymentState)
    return None


def _base() -> Path:
    # Not gettempdir() at once: it passes over a folder on a full disk, and what runs there would not be found again.
    for folder in filter(None, (os.environ.get("TMPDIR"), "/tmp")):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder).absolute() / f"tokenmill-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}"


def _lock_path(base: Path, deployment: str) -> Path:
    if not _NAME.fullmatch(deployment):
        raise SettingsError(
            f"deployment: {deployment!r} is not a name; use 1 to 64 letters, digits, '-' and '_'", param="deployment"
        )
    return base / f"{deployment}.lock"


def _try_lock(base: Path, deployment: str) -> int | None:
    """An open, locked file descriptor; None when a living process holds the lock."""
    path = _lock_path(base, deployment)
    while True:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise Unavailable(f"{base} belongs to another user; set TMPDIR to a folder of your own")
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the base was removed between the two calls
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        # The holder before us may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):  # another deployment lives in it
        path.parent.rmdir()


def _whereabouts(deployment: str) -> str:
    state = running(deployment)
    if state is None:
        return "starting"
    return f"pid {state.pid}" + (f", {state.url}" if state.url else "")
