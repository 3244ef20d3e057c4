"""Every decision as a line of JSON in a file. Written on a thread of its own: a slow disk delays no decision."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import SettingsError
from controlplane.telemetry import get_logger
from services.router.decision import Decision
from services.router.history import record

__all__ = ["DecisionsLog"]

MOST_WAITING = 1000
MOST_BYTES = 256 * 2**20
"""Past it the file becomes FILE.1, in the place of the one before."""
CLOSE_S = 5.0


class DecisionsLog:
    """Owns file and thread. What the disk is too slow for is left out, and counted."""

    def __init__(self, path: Path, policy: str, registry: CollectorRegistry) -> None:
        """Raises `SettingsError` when the file cannot be written."""
        self._path = path
        self._policy = policy
        self._log = get_logger(__name__)
        self._waiting: queue.Queue[Decision | None] = queue.Queue(MOST_WAITING)
        lines = Counter(
            "tokenmill_router_decisions_logged", "Lines of the decisions log", ["result"], registry=registry
        )
        self._written, self._left_out = lines.labels("written"), lines.labels("left_out")
        self._file = self._open()
        self._thread = threading.Thread(target=self._run, name="decisions log", daemon=True)
        self._thread.start()

    def add(self, decision: Decision) -> None:
        """Takes a decision whose outcome is known. Never waits."""
        try:
            self._waiting.put_nowait(decision)
        except queue.Full:
            self._left_out.inc()

    def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("ab", buffering=0)
        except OSError as error:
            raise SettingsError(
                f"decisions_log {self._path} cannot be written: {error}", param="router.decisions_log"
            ) from error

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        while (decision := self._waiting.get()) is not None:
            try:
                self._write(encoder.encode(record(decision, self._policy)) + b"\n")
            except (OSError, SettingsError) as error:
                self._left_out.inc()
                self._log.warning("a decision was not logged", file=str(self._path), reason=str(error))
            else:
                self._written.inc()
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file.tell() + len(line) > MOST_BYTES:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._open()
        self._file.write(line)
