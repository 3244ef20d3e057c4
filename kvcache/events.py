"""KV events: what became readable on a worker, and what went. Hashes only, never tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Cleared", "KvEvent", "KvEventBatch", "Removed", "Stored", "Tier"]


class Tier(IntEnum):
    """Where a block lies, fastest first. Values are those of kv.proto."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4
    """Another node's memory, from which the worker can read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """`hashes[0]` follows `parent` (None: it begins a prompt); each next one follows the one before."""

    parent: int | None
    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks can no longer be read from this tier."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block of the worker is gone, in all tiers."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Consecutive events of one rank; `events[i]` has number `first_seq + i`, from 1 within (instance, epoch, rank)."""

    instance_id: str
    epoch: int
    first_seq: int
    events: tuple[KvEvent, ...]
    dp_rank: int = 0
    """Data-parallel rank: each has an engine and a cache of its own."""

    @property
    def last_seq(self) -> int:
        """Number of the last event here."""
        return self.first_seq + len(self.events) - 1
