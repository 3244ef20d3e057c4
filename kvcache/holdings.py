"""A worker's own picture of the blocks it holds: the truth that every router's index follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.events import Cleared, KvEvent, Removed, Stored, Tier

__all__ = ["Holdings"]


@dataclass(slots=True)
class _Held:
    parent: int | None
    copies: int = 1


class Holdings:
    """The distinct (hash, tier) pairs an engine holds, kept by its events.

    An engine may keep several copies of one block and say Stored and Removed for each: copies are counted here, and
    only the first and the last are news to others.
    """

    def __init__(self) -> None:
        self._tiers: dict[Tier, dict[int, _Held]] = {tier: {} for tier in Tier}
        self._xor = 0

    @property
    def xor(self) -> int:
        """XOR of the hashes of all pairs held."""
        return self._xor

    @property
    def count(self) -> int:
        """Pairs held."""
        return sum(map(len, self._tiers.values()))

    def hashes(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """The blocks of one tier, in the order they came."""
        return list(self._tiers[tier])

    def parents(self, tier: Tier = Tier.DEVICE) -> list[int | None]:
        """The block before each of `hashes(tier)`, in the same order."""
        return [held.parent for held in self._tiers[tier].values()]

    def apply(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Takes the engine's events; returns those that tell the change of the set, and nothing else."""
        news: list[KvEvent] = []
        for event in events:
            match event:
                case Stored():
                    self._store(event, news)
                case Removed():
                    self._remove(event, news)
                case Cleared():
                    self.clear()
                    news.append(event)
        return news

    def clear(self) -> None:
        """Nothing is held any more."""
        for held in self._tiers.values():
            held.clear()
        self._xor = 0

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the running XOR or a count is not that of the blocks."""
        xor = 0
        for held in self._tiers.values():
            for block, entry in held.items():
                xor ^= block
                if entry.copies < 1:
                    raise AssertionError(f"block {block:#x} is listed with {entry.copies} copies")
        if xor != self._xor:
            raise AssertionError(f"running XOR {self._xor:#x}, blocks give {xor:#x}")

    def _store(self, event: Stored, news: list[KvEvent]) -> None:
        held = self._tiers[event.tier]
        parent = run_parent = event.parent
        run: list[int] = []  # new blocks in a row
        for block in event.hashes:
            known = held.get(block)
            if known is None:
                if not run:
                    run_parent = parent
                held[block] = _Held(parent)
                self._xor ^= block
                run.append(block)
            else:
                known.copies += 1
                if run:
                    news.append(Stored(run_parent, tuple(run), event.tier))
                    run = []
            parent = block
        if run:
            news.append(Stored(run_parent, tuple(run), event.tier))

    def _remove(self, event: Removed, news: list[KvEvent]) -> None:
        held = self._tiers[event.tier]
        gone: list[int] = []
        for block in event.hashes:
            known = held.get(block)
            if known is None:  # e.g. a copy from before a clear
                continue
            known.copies -= 1
            if not known.copies:
                del held[block]
                self._xor ^= block
                gone.append(block)
        if gone:
            news.append(Removed(tuple(gone), event.tier))
