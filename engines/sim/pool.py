"""The KV blocks of a simulated engine: who uses which, and which hold a prefix that can be found again. No I/O.

A block is free, in use (by as many as its count says), or idle: used by nobody, but found by its hash until it is
evicted, least recently used first. One block at most is found by a hash; a second one with the same content stays
private to its user. So `Stored` and `Removed` alternate for each hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcache.events import Cleared, KvEvent, Removed, Stored

__all__ = ["BlockPool"]


class BlockPool:
    """`total` blocks, numbered from 0. Methods never fail half-way."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._uses = [0] * total
        self._hash_of: list[int | None] = [None] * total
        self._found: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks, least recently used first."""
        self._events: list[KvEvent] = []
        self._evicted: list[int] = []
        """Hashes evicted since the last event."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Blocks with at least one user."""
        return self.total - self.available

    def allocate(self) -> int:
        """A block for one user, content undefined. Raises `IndexError` when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._evicted.append(self._unname(block))
        else:
            raise IndexError("no block is available")
        self._uses[block] = 1
        return block

    def find(self, hashes: Iterable[int], limit: int) -> list[int]:
        """The blocks of the longest found prefix of `hashes`, at most `limit`. `share` them before anything else."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._found.get(block_hash)
            if block is None or len(blocks) == limit:
                break
            blocks.append(block)
        return blocks

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these would no longer be available once shared."""
        return sum(self._uses[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each of these found blocks."""
        for block in blocks:
            if self._uses[block] == 0:
                del self._idle[block]
            self._uses[block] += 1

    def publish(self, parent: int | None, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """These consecutive blocks are full and can be found from now on, except where an equal one can already."""
        run: list[int] = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash in self._found:
                self._store(parent, run)
                run, parent = [], block_hash
            else:
                self._found[block_hash] = block
                self._hash_of[block] = block_hash
                run.append(block_hash)
        self._store(parent, run)

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each; give a sequence's blocks in order, so that its end is evicted before its start."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if self._uses[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def clear(self) -> bool:
        """Forgets every hash. False, and nothing done, while a block is in use."""
        if self.in_use:
            return False
        for block in self._idle:
            self._unname(block)
        self._free.extend(self._idle)
        self._idle.clear()
        self._evicted.clear()
        self._events.append(Cleared())
        return True

    def drain_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        self._flush_evicted()
        events, self._events = self._events, []
        return events

    def check_integrity(self, users: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless the pool agrees with the blocks its users hold."""
        uses = [0] * self.total
        for blocks in users:
            for block in blocks:
                uses[block] += 1
        assert uses == self._uses, "a block's count differs from its users"
        named = {block for block in range(self.total) if self._hash_of[block] is not None}
        assert {block: self._hash_of[block] for block in named} == {b: h for h, b in self._found.items()}
        unused = {block for block in range(self.total) if uses[block] == 0}
        assert sorted(self._free) == sorted(unused - named), "a free block leaked or is used"
        assert set(self._idle) == unused & named, "an idle block leaked or is used"

    def _store(self, parent: int | None, run: list[int]) -> None:
        if run:
            self._flush_evicted()
            self._events.append(Stored(parent, tuple(run)))

    def _flush_evicted(self) -> None:
        if self._evicted:
            self._events.append(Removed(tuple(self._evicted)))
            self._evicted.clear()

    def _unname(self, block: int) -> int:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        del self._found[block_hash]
        return block_hash
