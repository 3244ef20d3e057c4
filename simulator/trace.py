"""Request traces: who came when, with how long a prompt, made of which blocks. Pure, but for reading the file.

Mooncake's format is a JSON object a line: `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, one for
each 512 tokens of the prompt begun; equal ids are equal prefixes. Azure's is a CSV of `TIMESTAMP`, `ContextTokens`
and `GeneratedTokens`; it says nothing of prefixes, so no two of its prompts share any.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
from xxhash import xxh3_64_intdigest

from controlplane.errors import SettingsError

__all__ = ["TRACE_BLOCK", "Arrival", "block_hashes", "read_trace", "spread"]

TRACE_BLOCK = 512
"""Tokens that one hash id stands for."""
_COARSE = 2
"""Timestamps that each stand for so many requests on average are a clock's ticks, not moments of arrival."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    number: int
    """Its place in the trace."""
    at_s: float
    """Since the trace began."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One for each `TRACE_BLOCK` tokens begun; empty: its prompt is like no other."""


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int = 0) -> list[Arrival]:
    """The first `limit` requests, or all, by time. Raises `SettingsError` with the line that cannot be used."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _azure if path.suffix == ".csv" else _mooncake
            arrivals = _take(path, read(file), limit)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"trace {path} cannot be read: {error}", param="trace") from error
    if not arrivals:
        raise SettingsError(f"trace {path} has no requests", param="trace")
    first = min(arrival.at_s for arrival in arrivals)
    return sorted((replace(one, at_s=one.at_s - first) for one in arrivals), key=lambda one: one.at_s)


def _take(path: Path, rows: Iterator[tuple[int, Callable[[], Arrival]]], limit: int) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for line, parse in rows:
        try:
            arrival = parse()
        except ValueError as error:  # msgspec's errors are ValueErrors, too
            raise SettingsError(f"{path}, line {line}: {error}", param="trace") from error
        arrivals.append(replace(arrival, number=len(arrivals)))
        if len(arrivals) == limit:
            break
    return arrivals


def _mooncake(lines: Iterable[str]) -> Iterator[tuple[int, Callable[[], Arrival]]]:
    decoder = msgspec.json.Decoder(_Row)

    def parse(line: str) -> Arrival:
        row = decoder.decode(line)
        _check("timestamp", row.timestamp, 0)
        _check("input_length", row.input_length, 1)
        _check("output_length", row.output_length, 1)
        blocks = -(-row.input_length // TRACE_BLOCK)
        if len(row.hash_ids) != blocks:
            raise ValueError(
                f"{len(row.hash_ids)} hash_ids for an input_length of {row.input_length}; "
                f"it takes {blocks}, one for each {TRACE_BLOCK} tokens begun"
            )
        if any(not 0 <= one < 1 << 64 for one in row.hash_ids):
            raise ValueError("a hash id is not a number of 64 bits")
        return Arrival(0, row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))

    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, lambda line=line: parse(line)  # type: ignore[misc]


def _azure(lines: Iterable[str]) -> Iterator[tuple[int, Callable[[], Arrival]]]:
    rows = csv.reader(lines)
    wanted = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

    def parse_head(head: list[str]) -> Arrival:
        raise ValueError(f"the columns are {', '.join(head)}; they must be {', '.join(wanted)}")

    def parse(row: list[str]) -> Arrival:
        if len(row) != len(wanted):
            raise ValueError(f"{len(row)} values; there must be {len(wanted)}: {', '.join(wanted)}")
        at = datetime.fromisoformat(row[0][:26])  # it has a seventh digit, which Python has not
        prompt, output = int(row[1]), int(row[2])
        _check("ContextTokens", prompt, 1)
        _check("GeneratedTokens", output, 1)
        return Arrival(0, at.timestamp(), prompt, output)

    for row in rows:
        if rows.line_num == 1:
            if row != wanted:
                yield 1, lambda head=row: parse_head(head)  # type: ignore[misc]
        elif row:
            yield rows.line_num, lambda row=row: parse(row)  # type: ignore[misc]


def _check(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def spread(arrivals: Sequence[Arrival], seed: int, speed: float = 1.0) -> list[Arrival]:
    """The same, `speed` times as fast, and with the arrivals that share one tick of a coarse clock spread over it.

    Mooncake's conversation trace has ticks of 3 s; what came in one of them did not come as one burst.
    """
    window = _window_s(arrivals)
    chance = random.Random(seed)
    moved = [replace(one, at_s=(one.at_s + window * chance.random()) / speed) for one in arrivals]
    return sorted(moved, key=lambda one: one.at_s)


def _window_s(arrivals: Sequence[Arrival]) -> float:
    times = sorted({one.at_s for one in arrivals})
    if len(times) < _COARSE or len(arrivals) < _COARSE * len(times):
        return 0.0
    return median(later - sooner for sooner, later in pairwise(times))


def block_hashes(arrival: Arrival, block_size: int) -> list[int]:
    """Sequence hashes of the prompt's full blocks. Parts of a block of the trace share its id."""
    count = arrival.prompt_tokens // block_size
    parts = TRACE_BLOCK // block_size
    hashes: list[int] = []
    parent = 0 if arrival.hash_ids else arrival.number + 1
    for position in range(-(-count // parts)):
        name = arrival.hash_ids[position] if arrival.hash_ids else position
        content = name.to_bytes(8, "little")
        for part in range(min(parts, count - len(hashes))):
            parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + content, part)
            hashes.append(parent)
    return hashes
