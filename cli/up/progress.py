"""What `tokenmill up` shows on standard error: a living table in a terminal, else a line for every change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

__all__ = ["Progress"]

_READY = "ready"


class Progress:
    """A context manager; after it, `update` still writes lines."""

    def __init__(self, names: Iterable[str], console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._texts = dict.fromkeys(names, "starting")
        self._ready_after_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._table, console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def update(self, name: str, text: str) -> None:
        """Says what `name` is doing; the same again is not repeated. Never fails, and neither do the others."""
        if self._texts[name] == text:
            return
        self._texts[name] = text
        self._ready_after_s.pop(name, None)
        if self._live is None:
            self.say(f"{name}: {text}")

    def ready(self, name: str) -> None:
        """Says that `name` has come to work."""
        if self._texts[name] != _READY:
            self.update(name, _READY)
            self._ready_after_s[name] = time.monotonic() - self._started

    def say(self, text: str) -> None:
        """A line of its own, unless nobody takes it: a full disk or a closed terminal."""
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def settle(self) -> None:
        """Ends the table, leaving its last state on screen. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, text in self._texts.items():
            if text == _READY:
                table.add_row("[green]✓[/]", name, f"ready [dim]after {self._ready_after_s.get(name, 0):.1f} s[/]")
            else:
                table.add_row(self._spinner, name, escape(text))
        return table
