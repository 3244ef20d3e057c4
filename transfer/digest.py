"""The digest that travels beside a block and is compared where the block arrives."""

from __future__ import annotations

import xxhash

__all__ = ["digest"]


def digest(block: bytes | memoryview) -> bytes:
    """xxh3_128 over the bytes, 16 bytes. Guards against wrong or torn bytes, not against an adversary."""
    return xxhash.xxh3_128_digest(block)
