"""Real bytes behind simulated KV blocks, so that moving them is real and a wrong byte is caught.

A block's content is a known function of its sequence hash: `pattern + hash`, word by word modulo 2**64, where `pattern`
is one fixed run of pseudo-random words. A reader knows what it should have got.
"""

from __future__ import annotations

import numpy as np

from transfer import Span

__all__ = ["KvMemory"]

_WORD = 8
_PATTERN_SEED = 0x7063_6B6D


class KvMemory:
    """One region for all blocks, in order."""

    def __init__(self, total_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        words = block_bytes // _WORD
        self._blocks = np.zeros((total_blocks, words), dtype=np.uint64)
        self._bytes = self._blocks.data.cast("B")
        self._pattern = np.random.default_rng(_PATTERN_SEED).integers(0, 2**64, words, dtype=np.uint64)

    @property
    def span(self) -> Span:
        """The whole region."""
        return self._blocks.ctypes.data, self._blocks.nbytes

    def fill(self, block: int, block_hash: int) -> None:
        """Writes what a block of that sequence hash contains."""
        np.add(self._pattern, np.uint64(block_hash), out=self._blocks[block])

    def has(self, block: int, block_hash: int) -> bool:
        """Whether that is what it contains, to the last byte."""
        return np.array_equal(self._blocks[block], self._pattern + np.uint64(block_hash))

    def view(self, block: int) -> memoryview:
        """Its bytes."""
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]
