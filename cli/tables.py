"""Tables on standard output."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]

_WIDTH_OF_A_FILE = 240
"""What reads a pipe or a file has no width: nothing is cut or wrapped for it."""


def print_table(columns: list[str], rows: list[list[str | Text]]) -> None:
    """Prints rows under headings, as wide as the terminal at most."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    Console(width=width, markup=False, highlight=False).print(table)
