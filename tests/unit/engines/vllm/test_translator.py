"""vLLM's events in, sequence hashes out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.events import Cleared, Removed, Stored
from kvcache.hashing import hash_block, hash_blocks, root_hash
from kvcache.index import KvIndex

pytest.importorskip("zmq", reason="comes with vLLM")

from engines.vllm.kv_events import Translator

BLOCK = 4
SEED = 11
MODEL = "model"
ROOT = root_hash(MODEL, seed=SEED)


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def removed(*hashes: Any, group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": group}


def chain(tokens: list[int], root: int = ROOT) -> tuple[int, ...]:
    return tuple(hash_blocks(tokens, BLOCK, root, SEED))


@pytest.fixture
def translator() -> Translator:
    return Translator(MODEL, BLOCK, SEED)


def test_a_prompts_blocks_get_the_hashes_that_a_frontend_computes(translator: Translator) -> None:
    tokens = list(range(12))
    assert translator.translate([stored(["x", "y", "z"], tokens)]) == [Stored(None, chain(tokens))]


def test_two_engines_that_name_the_same_tokens_differently_are_found_by_one_prompt() -> None:
    tokens, index = list(range(12)), KvIndex()
    for worker, names in (("a", ["x", "y", "z"]), ("b", [b"1", b"2"])):
        translator = Translator(MODEL, BLOCK, SEED)
        for event in translator.translate([stored(names, tokens[: BLOCK * len(names)])]):
            index.apply(index.open(worker), event)
    assert index.overlaps(chain(tokens)) == {"a": 3, "b": 2}


def test_later_blocks_chain_through_their_parent(translator: Translator) -> None:
    tokens = list(range(12))
    translator.translate([stored(["x"], tokens[:4])])
    (event,) = translator.translate([stored(["y", "z"], tokens[4:], parent="x")])
    assert event == Stored(chain(tokens)[0], chain(tokens)[1:])


def test_a_block_of_unknown_parent_is_left_out_until_it_is_stored_anew(translator: Translator) -> None:
    assert translator.translate([stored(["y"], [1, 2, 3, 4], parent="lost"), removed("y")]) == []


def test_copies_of_one_block_are_told_of_once(translator: Translator) -> None:
    tokens = list(range(8))
    first = stored(["x", "y"], tokens)
    assert translator.translate([first, first]) == [Stored(None, chain(tokens))]
    assert translator.translate([removed("y")]) == []
    assert translator.translate([removed("y")]) == [Removed(chain(tokens)[1:])]
    assert translator.translate([removed("y")]) == []


def test_a_run_with_a_known_block_inside_is_split_around_it(translator: Translator) -> None:
    tokens = list(range(12))
    x, y, z = chain(tokens)
    translator.translate([stored(["x", "y"], tokens[:8]), removed("x")])
    assert translator.translate([stored(["x", "y", "z"], tokens)]) == [Stored(None, (x,)), Stored(y, (z,))]


def test_clearing_forgets_all(translator: Translator) -> None:
    translator.translate([stored(["x"], [1, 2, 3, 4])])
    assert translator.translate([{"type": "AllBlocksCleared"}, removed("x")]) == [Cleared()]
    assert translator.hashes == set()


def test_only_groups_that_hold_whole_prefixes_count(translator: Translator) -> None:
    window = stored(["x"], [1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="sliding_window")
    assert translator.translate([window, removed("x", group=1)]) == []
    translator.translate([stored(["x"], [1, 2, 3, 4])])
    assert translator.translate([removed("x", group=1)]) == []
    assert translator.translate([removed("x")]) != []


def test_salt_and_lora_are_in_the_root_and_inherited(translator: Translator) -> None:
    tokens = list(range(8))
    salted = stored(["x"], tokens[:4], lora_name="poet", extra_keys=[("poet", "tenant")])
    child = stored(["y"], tokens[4:], parent="x", lora_name="poet", extra_keys=[("poet",)])
    expected = chain(tokens, root_hash(MODEL, "poet", "tenant", seed=SEED))
    assert translator.translate([salted, child]) == [Stored(None, expected[:1]), Stored(expected[0], expected[1:])]
    unsalted = stored(["z"], tokens[:4], lora_name="poet", extra_keys=[("poet",)])
    assert translator.translate([unsalted]) == [Stored(None, chain(tokens[:4], root_hash(MODEL, "poet", seed=SEED)))]


def test_media_in_a_block_change_its_hash(translator: Translator) -> None:
    (event,) = translator.translate([stored(["x"], [1, 2, 3, 4], extra_keys=[[["image", 0]]])])
    assert isinstance(event, Stored)
    assert event.hashes[0] != hash_block(ROOT, [1, 2, 3, 4], SEED)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4)), max_size=60))
def test_the_picture_is_that_of_counted_copies(steps: list[tuple[bool, int, int]]) -> None:
    """Against a slow model: a pool that stores prefixes of four prompts and evicts copies one by one."""
    translator = Translator(MODEL, BLOCK, SEED)
    prompts = [[prompt * 100 + i for i in range(16)] for prompt in range(4)]
    copies: Counter[tuple[int, int]] = Counter()
    held: set[int] = set()
    for store, prompt, depth in steps:
        names = [(prompt, i) for i in range(depth)]
        if store:
            events = [stored(names, prompts[prompt][: depth * BLOCK])]
            copies.update(names)
        else:
            events = [removed(names[-1])]
            copies.subtract({names[-1]: min(1, copies[names[-1]])})
        for event in translator.translate(events):
            if isinstance(event, Stored):
                assert held.isdisjoint(event.hashes)
                held.update(event.hashes)
            elif isinstance(event, Removed):
                assert held.issuperset(event.hashes)
                held.difference_update(event.hashes)
        expected = {chain(prompts[p])[i] for (p, i), count in copies.items() if count > 0}
        assert held == expected == translator.hashes
