"""The holders of an index as bits, and back. Pure.

A holder has a *lane*: the lowest bit of a hex digit of its own, in which each tier is a bit. Ints of such digits are
sets of holders; they are made and taken apart by text where that is the faster way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from kvcache.events import Tier

__all__ = ["Holder", "Lanes"]

FEW = 24
"""Names looked up one by one; for more it is faster to go over all, and to remember the answer."""
MOST_REMEMBERED = 256
"""Such answers: at a thousand workers 8 KB each."""

_BITS = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4, Tier.PEER: 8}
_DIGITS = bytes.maketrans(b"01", b"\0\1")


class Holder:
    """One rank of one worker in an index, made by `KvIndex.open`. `xor` and `count`: of all (hash, tier) it holds."""

    __slots__ = ("count", "dp_rank", "forgotten", "forgotten_xor", "lane", "name", "routed", "xor")

    def __init__(self, name: str, dp_rank: int, routed: bool) -> None:
        self.name = name
        self.dp_rank = dp_rank
        self.routed = routed
        self.reset()

    def reset(self) -> None:
        """It holds nothing, and has no lane until it does."""
        self.lane = 0
        self.xor = self.count = 0
        self.forgotten = self.forgotten_xor = 0
        """Of them, those the index has no room for."""

    def bit(self, tier: Tier) -> int:
        """What stands for it in that tier; 0: it has no lane."""
        return self.lane * _BITS[tier]

    def tiers_in(self, holders: int) -> int:
        """Its digit in a set of holders: a bit for each tier, DEVICE the lowest."""
        return holders >> (self.lane.bit_length() - 1) & 15


class Lanes:
    """Which lane is whose. The sets are for reading."""

    def __init__(self) -> None:
        self.routed = 0
        """Lanes that matches are answered for."""
        self.tiered = 0
        """All four bits of holders that have had a block below the device."""
        self._owners: list[Holder | None] = []
        """By lane number."""
        self._names: list[str] = []
        """By lane number."""
        self._free: list[int] = []
        self._named_before: dict[int, tuple[str, ...]] = {}

    def enter(self, holder: Holder, tier: Tier) -> int:
        """What stands for it in that tier; from now on it has a lane, and something there."""
        if not holder.lane:
            self._named_before.clear()
            if self._free:
                number = self._free.pop()
                self._owners[number], self._names[number] = holder, holder.name
            else:
                number = len(self._owners)
                self._owners.append(holder)
                self._names.append(holder.name)
            holder.lane = 1 << 4 * number
            if holder.routed:
                self.routed |= holder.lane
        if tier is not Tier.DEVICE:
            self.tiered |= holder.lane * 15
        return holder.bit(tier)

    def leave(self, holder: Holder) -> int:
        """It has no lane any more. Its bits, which are nobody's until they are freed; 0: it had none."""
        bits = holder.lane * 15
        if bits:
            self.routed &= ~bits
            self.tiered &= ~bits
            self._owners[holder.lane.bit_length() >> 2] = None
        holder.reset()
        return bits

    def free(self, bits: int) -> None:
        """These stand in no set any more: others may have them."""
        self._free.extend(_numbers(bits))

    def holders(self, bits: int) -> Iterator[Holder]:
        """Those with a bit in a set."""
        return (owner for number in _numbers(bits) if (owner := self._owners[number]) is not None)

    def all(self) -> list[Holder]:
        """Those that have a lane."""
        return [holder for holder in self._owners if holder is not None]

    def names(self, lanes: int) -> Sequence[str]:
        """The names of the lanes in a set of only such."""
        if lanes.bit_count() <= FEW:
            digits, names, at = f"{lanes:x}"[::-1], [], -1
            while (at := digits.find("1", at + 1)) >= 0:
                names.append(self._names[at])
            return names
        known = self._named_before.get(lanes)
        if known is None:
            if len(self._named_before) >= MOST_REMEMBERED:
                self._named_before.clear()
            digits = f"{lanes:x}"[::-1]
            known = tuple(compress(self._names, digits.encode().translate(_DIGITS)))
            self._named_before[lanes] = known
        return known


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        number = (bits.bit_length() - 1) >> 2
        yield number
        bits &= (1 << 4 * number) - 1
