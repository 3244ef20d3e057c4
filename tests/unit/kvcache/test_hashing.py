from __future__ import annotations

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache.hashing import hash_block, hash_blocks, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
U64 = st.integers(0, 2**64 - 1)


@given(TOKENS, st.integers(1, 20), U64, U64)
def test_a_hash_is_xxh3_of_parent_and_tokens_chained(tokens: list[int], size: int, root: int, seed: int) -> None:
    expected, parent = [], root
    for start in range(0, len(tokens) - size + 1, size):
        data = struct.pack(f"<Q{size}I", parent, *tokens[start : start + size])
        parent = xxhash.xxh3_64_intdigest(data, seed)
        expected.append(parent)
    assert hash_blocks(tokens, size, root, seed) == expected


@given(TOKENS, st.integers(1, 8), U64)
def test_every_kind_of_token_buffer_gives_the_same_hashes(tokens: list[int], size: int, seed: int) -> None:
    buffer = array("I", tokens)
    expected = hash_blocks(tokens, size, 7, seed)
    assert hash_blocks(buffer, size, 7, seed) == expected
    assert hash_blocks(memoryview(buffer), size, 7, seed) == expected
    assert hash_blocks(tuple(tokens), size, 7, seed) == expected
    assert hash_blocks(array("Q", tokens), size, 7, seed) == expected


def test_block_by_block_equals_all_at_once_with_extra_keys_too() -> None:
    tokens, extras = list(range(12)), [b"", b"image", b""]
    parent, chained = 3, []
    for index, extra in enumerate(extras):
        parent = hash_block(parent, tokens[index * 4 : index * 4 + 4], 9, extra)
        chained.append(parent)
    assert hash_blocks(tokens, 4, 3, 9, extras) == chained
    plain = hash_blocks(tokens, 4, 3, 9)
    assert plain[0] == chained[0]
    assert plain[1] != chained[1]
    assert plain[2] != chained[2]


def test_a_hash_is_the_same_in_every_process_and_release() -> None:
    root = root_hash("sha256:abc", "lora", "salt", seed=1)
    assert root == 9101897452025851323
    assert hash_blocks([1, 2, 3, 4, 5], 2, root, 1) == [7078587078426743726, 17579417008798425044]


def test_roots_differ_by_model_lora_salt_and_seed() -> None:
    roots = {
        root_hash("ab", "c", "", seed=1),
        root_hash("a", "bc", "", seed=1),
        root_hash("ab", "", "c", seed=1),
        root_hash("ab", "c", "", seed=2),
        root_hash("ab", seed=1),
    }
    assert len(roots) == 5


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        hash_blocks([1], 0, 0, 0)
    with pytest.raises(ValueError, match="extra_keys has 1 entries for 2 full blocks"):
        hash_blocks([1, 2], 1, 0, 0, [b""])
