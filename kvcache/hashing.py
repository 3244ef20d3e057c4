"""Sequence hashes: the name of a KV block and of the whole prefix that ends with it.

    root       = xxh3_64(length-prefixed UTF-8 of (model fingerprint, LoRA, salt), seed)
    block hash = xxh3_64(parent as 8 bytes LE || tokens as u32 LE || the block's extra key, seed)

Equal hash means equal prefix from the start. It is a routing hint: a collision costs time, never correctness. The seed
is the deployment's own, so that nobody outside can make collisions or probe a tenant's cache.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["hash_block", "hash_blocks", "root_hash"]

_TOKEN_BYTES = 4


def root_hash(model_fingerprint: str, lora: str = "", salt: str = "", *, seed: int) -> int:
    """The parent of every first block of this model, LoRA and tenant salt."""
    parts = [part.encode() for part in (model_fingerprint, lora, salt)]
    # Lengths keep ("ab", "c") apart from ("a", "bc").
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(4, "little") + part for part in parts), seed)


def hash_block(parent: int, tokens: array[int] | memoryview | Sequence[int], seed: int, extra: bytes = b"") -> int:
    """The hash of one full block that follows `parent`."""
    return xxh3_64_intdigest(parent.to_bytes(8, "little") + _token_bytes(tokens) + extra, seed)


def hash_blocks(
    tokens: array[int] | memoryview | Sequence[int],
    block_size: int,
    root: int,
    seed: int,
    extra_keys: Sequence[bytes] | None = None,
) -> list[int]:
    """The hashes of all full blocks, first to last; a last partial block has none.

    `extra_keys` has one entry a full block, empty where it has none (e.g. the digest of an image in that block).
    An `array('I')` is fastest; a list costs as much again to convert.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    raw = _token_bytes(tokens)
    step = block_size * _TOKEN_BYTES
    count = len(raw) // step
    if extra_keys is not None and len(extra_keys) < count:
        raise ValueError(f"extra_keys has {len(extra_keys)} entries for {count} full blocks; give one a block")
    digest = xxh3_64_intdigest
    parent = root
    hashes: list[int] = []
    if extra_keys is None:  # apart, because this loop runs for every request
        for start in range(0, count * step, step):
            parent = digest(parent.to_bytes(8, "little") + raw[start : start + step], seed)
            hashes.append(parent)
        return hashes
    for start, extra in zip(range(0, count * step, step), extra_keys, strict=False):
        parent = digest(parent.to_bytes(8, "little") + raw[start : start + step] + extra, seed)
        hashes.append(parent)
    return hashes


def _token_bytes(tokens: array[int] | memoryview | Sequence[int]) -> bytes:
    """Tokens as u32, little endian."""
    if not isinstance(tokens, array | memoryview) or tokens.itemsize != _TOKEN_BYTES:
        tokens = array("I", tokens)
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()
