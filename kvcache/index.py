"""Who holds which block: the router's index over all workers.

One dict from a block's hash to the set of its holders, the set being an int with a bit (a *lane*) for each worker and
tier. Along a prompt the holders only become fewer, because a block is of use only with those before it; so a match
leaps over equal sets and bisects where they change. Its cost grows with the number of distinct overlap depths, not
with the number of blocks or workers.

A worker may hold a block without the one before it (evicted in the middle, told late). Such a *seam* is known from the
chain, which every stored event tells; a match across a seam looks at each block and stays exact.

Pure, not thread safe. Cost of the chain: a parent and the children of each block, about 50 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import xor

import msgspec

from kvcache.events import Cleared, KvEvent, Removed, Stored, Tier

__all__ = ["Holder", "KvIndex", "Match"]

LEAP = 32
"""Blocks a match jumps. Larger wastes probes where depths differ, smaller where they do not."""
MAX_INTERNED = 65_536
"""Distinct holder sets remembered so that equal ones share memory."""

Match = list[tuple[int, int]]
"""(depth in blocks, lanes that hold exactly so many leading blocks), by rising depth; depth 0 is left out."""


class Holder:
    """One worker's part of an index, made by `KvIndex.open`. `xor` and `count` are over its distinct (hash, tier)."""

    __slots__ = ("_lanes", "count", "name", "routed", "xor")

    def __init__(self, name: str) -> None:
        self.name = name
        self.routed = False
        self.xor = 0
        self.count = 0
        self._lanes: dict[Tier, int] = {}


class _Block(msgspec.Struct, gc=False):  # no references to other blocks, so no cycles: the collector may skip millions
    hash: int
    """The very object that is the key, so that parents and children share it."""
    holders: int = 0
    """0 with children: not held itself, kept for the chain."""
    parent: int | None = None
    children: int | set[int] | None = None


class KvIndex:
    """Which worker holds which block, in which tier. Matches are answered from the device tier of routed holders."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._seams: set[int] = set()
        """Blocks with an open device holder that lacks the block before. After a close it may name too many."""
        self._interned: dict[int, int] = {}
        self._owners: list[Holder | None] = []
        """By lane number."""
        self._free: list[int] = []
        self._device = 0
        """Lanes of open holders' device tier."""
        self._routed = 0
        """Those of them a match answers for."""
        self._dead = 0
        """Lanes of closed holders whose bits still stand in blocks."""
        self._sweeping = 0
        """Lanes whose bits go as `_sweep_left` is worked off."""
        self._sweep_left: list[int] = []

    def __len__(self) -> int:
        """Distinct blocks, those of closed holders not yet swept included."""
        return len(self._blocks)

    # Holders

    def open(self, name: str, *, routed: bool = True) -> Holder:
        """A new, empty part of the index. `routed=False`: invisible to matches until `route`."""
        holder = Holder(name)
        holder.routed = routed
        return holder

    def route(self, holder: Holder) -> None:
        """From now on matches see it."""
        holder.routed = True
        self._routed |= holder._lanes.get(Tier.DEVICE, 0)

    def close(self, holder: Holder) -> None:
        """Forgets all it holds, in constant time; its bits are swept out as other blocks come."""
        for lane in holder._lanes.values():
            self._dead |= lane
            self._device &= ~lane
            self._routed &= ~lane
            self._owners[lane.bit_length() - 1] = None
        holder._lanes.clear()
        holder.xor = holder.count = 0

    # Changes

    def apply(self, holder: Holder, event: KvEvent) -> None:
        """Takes one event of a holder. Repeats and removals of what is not held change nothing."""
        match event:
            case Stored(parent, hashes, tier):
                self.store(holder, parent, hashes, tier)
            case Removed(hashes, tier):
                self.remove(holder, hashes, tier)
            case Cleared():
                self.clear(holder)

    def clear(self, holder: Holder) -> None:
        """It holds nothing any more. Constant time."""
        self.close(holder)

    def store(self, holder: Holder, parent: int | None, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """`hashes[0]` follows `parent` (None: it begins a prompt), each next one the one before."""
        if not hashes:
            return
        lane = holder._lanes.get(tier) or self._new_lane(holder, tier)
        blocks, interned = self._blocks, self._interned
        if len(interned) > MAX_INTERNED:
            interned.clear()
        lone = interned.setdefault(lane, lane)
        checksum, added = holder.xor, 0
        before = None if parent is None else blocks.get(parent) or self._placeholder(parent)
        if before is not None and lane & self._device and not before.holders & lane:
            self._seams.add(hashes[0])
        for block_hash in hashes:
            block = blocks.get(block_hash)
            if block is None:
                block = blocks[block_hash] = _Block(block_hash, lone)
            elif block.holders & lane:
                before = block
                continue
            else:
                holders = block.holders | lane
                block.holders = interned.setdefault(holders, holders)
            checksum ^= block_hash
            added += 1
            if before is not None and block.parent is None and before is not block:
                block.parent = before.hash
                siblings = before.children
                if siblings is None:
                    before.children = block.hash
                elif isinstance(siblings, set):
                    siblings.add(block.hash)
                else:
                    before.children = {siblings, block.hash}
            before = block
        holder.xor = checksum
        holder.count += added
        if self._seams:
            self._mend(hashes)
        if self._dead or self._sweeping:
            self._sweep(4 * len(hashes) + 64)

    def remove(self, holder: Holder, hashes: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """These blocks are gone from that tier of this holder."""
        lane = holder._lanes.get(tier)
        if lane is None:
            return
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.holders & lane:
                continue
            holder.xor ^= block_hash
            holder.count -= 1
            self._set_holders(block, block.holders & ~lane)
            if block.children is not None and lane & self._device:
                self._seams.update(child for child in _children(block) if self._blocks[child].holders & lane)

    # Questions

    def match(self, hashes: Sequence[int]) -> Match:
        """How many leading blocks of a prompt each routed lane holds."""
        found = self._leap(hashes)
        if self._seams and found and not self._seams.isdisjoint(hashes[: found[-1][0]]):
            return self._walk(hashes)
        return found

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks held, by holder's name; those that hold none are left out."""
        return {holder.name: depth for depth, lanes in self.match(hashes) for holder in self._owners_of(lanes)}

    def blocks(self, holder: Holder, tier: Tier = Tier.DEVICE) -> list[int]:
        """All a holder has in one tier. Scans the index: for diagnosis and tests."""
        lane = holder._lanes.get(tier, 0)
        return [block.hash for block in self._blocks.values() if block.holders & lane]

    def check_integrity(self, holders: Iterable[Holder]) -> None:
        """Raises `AssertionError` when an invariant is broken, given all open holders. Scans the index."""
        seams = set()
        for key, block in self._blocks.items():
            _require(key == block.hash, f"block {block.hash:#x} is filed under {key:#x}")
            _require(bool(block.holders or block.children), f"block {key:#x} has no holder and no children")
            _require(
                block.parent is None or key in _children(self._blocks[block.parent]),
                f"block {key:#x} is unknown to its parent",
            )
            for child in _children(block):
                _require(self._blocks[child].parent == key, f"block {child:#x} has another parent than {key:#x}")
            if self._is_seam(block):
                seams.add(key)
        clean = not self._dead and not self._sweeping
        _require(seams == self._seams if clean else seams <= self._seams, "the known seams are not those of the blocks")
        for holder in holders:
            held = [block for tier in Tier for block in self.blocks(holder, tier)]
            _require(len(held) == holder.count, f"{holder.name} counts {holder.count} blocks and holds {len(held)}")
            _require(reduce(xor, held, 0) == holder.xor, f"{holder.name}'s XOR is not that of its blocks")

    def _leap(self, hashes: Sequence[int]) -> Match:
        """`match`, given that no seam lies on the way."""
        found: Match = []
        if not hashes or not self._routed:
            return found
        get, nobody = self._blocks.get, _Block(0)
        seen = get(hashes[0], nobody).holders
        current = self._routed & seen
        at, last = 0, len(hashes) - 1
        while current and at < last:
            high = at + LEAP if at + LEAP < last else last
            holders = get(hashes[high], nobody).holders
            if holders is seen or holders & current == current:
                at, seen = high, holders
                continue
            low = at
            while high - low > 1:  # somebody leaves after `low` and is gone at `high`
                middle = (low + high) >> 1
                between = get(hashes[middle], nobody).holders
                if between is seen or between & current == current:
                    low = middle
                else:
                    high, holders = middle, between
            found.append((high, current & ~holders))
            at, seen = high, holders
            current &= holders
        if current:
            found.append((len(hashes), current))
        return found

    def _walk(self, hashes: Sequence[int]) -> Match:
        """`match`, block by block."""
        found: Match = []
        current, seen = self._routed, -1
        for depth, block_hash in enumerate(hashes):
            block = self._blocks.get(block_hash)
            holders = block.holders if block is not None else 0
            if holders is seen:
                continue
            seen = holders
            if current & ~holders:
                if depth:
                    found.append((depth, current & ~holders))
                current &= holders
                if not current:
                    return found
        found.append((len(hashes), current))
        return found

    def _owners_of(self, lanes: int) -> Iterator[Holder]:
        bits = f"{lanes:b}"
        last = len(bits) - 1
        position = bits.find("1")
        while position >= 0:
            owner = self._owners[last - position]
            if owner is not None:
                yield owner
            position = bits.find("1", position + 1)

    # Keeping house

    def _new_lane(self, holder: Holder, tier: Tier) -> int:
        if self._free:
            number = self._free.pop()
            self._owners[number] = holder
        else:
            number = len(self._owners)
            self._owners.append(holder)
        lane = holder._lanes[tier] = 1 << number
        if tier is Tier.DEVICE:
            self._device |= lane
            if holder.routed:
                self._routed |= lane
        return lane

    def _placeholder(self, block_hash: int) -> _Block:
        block = self._blocks[block_hash] = _Block(block_hash)
        return block

    def _set_holders(self, block: _Block, holders: int) -> None:
        """Fewer than before; a block that neither is held nor has children goes, and so on up the chain."""
        block.holders = self._interned.setdefault(holders, holders)
        if self._seams and block.hash in self._seams and not self._is_seam(block):
            self._seams.discard(block.hash)
        while not block.holders and block.children is None:
            del self._blocks[block.hash]
            if block.parent is None:
                return
            parent = self._blocks[block.parent]
            if isinstance(parent.children, set):
                parent.children.discard(block.hash)
                if not parent.children:
                    parent.children = None
            else:
                parent.children = None
            block = parent

    def _is_seam(self, block: _Block) -> bool:
        if block.parent is None:
            return False
        return block.holders & self._device & ~self._blocks[block.parent].holders != 0

    def _mend(self, hashes: Iterable[int]) -> None:
        """Looks again at the seams that newly stored blocks may have closed: their own and their children's."""
        for block_hash in hashes:
            block = self._blocks[block_hash]
            for near in (block_hash, *_children(block)):
                if near in self._seams and not self._is_seam(self._blocks[near]):
                    self._seams.discard(near)

    def _sweep(self, budget: int) -> None:
        """Takes closed holders' bits out of up to `budget` blocks; lanes are used again after a whole round."""
        if not self._sweeping:
            self._sweeping, self._dead = self._dead, 0
            self._sweep_left = list(self._blocks)
        keep = ~self._sweeping
        left = self._sweep_left
        for _ in range(min(budget, len(left))):
            block = self._blocks.get(left.pop())
            if block is not None:
                self._set_holders(block, block.holders & keep)
        if not left:
            lanes = self._sweeping
            self._sweeping = 0
            while lanes:
                number = lanes.bit_length() - 1
                self._free.append(number)
                lanes ^= 1 << number


def _children(block: _Block) -> Iterable[int]:
    children = block.children
    if children is None:
        return ()
    return children if isinstance(children, set) else (children,)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
