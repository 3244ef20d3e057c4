"""A child process's log: its last lines, and a bound on what it takes of the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["log_tail", "rotate"]


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
            for line, next_line in zip(said, [*said[1:], ""], strict=False)
            if not line.startswith(("\t", "goroutine ")) and not next_line.startswith("\t")
        ]
        return telling[-lines:]
    return []


def rotate(log_file: Path, max_bytes: int) -> None:
    """Copies a log that has grown past its bound to `<name>.1`, over the one before, and empties it. May block.

    The process that writes it holds it open for appending and writes on at its new end; lines it writes between the
    copy and the cut are lost. Where the disk has no room for a copy, the log is only emptied.
    """
    try:
        if log_file.stat().st_size <= max_bytes:
            return
    except FileNotFoundError:
        return
    before = log_file.with_name(f"{log_file.name}.1")
    try:
        shutil.copyfile(log_file, before)
    except OSError:
        before.unlink(missing_ok=True)
    os.truncate(log_file, 0)
