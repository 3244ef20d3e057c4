"""What the engine's KV events say it holds is what it finds when asked."""

from __future__ import annotations

import random

import pytest

from engines.base import SamplingParams
from kvcache.events import Cleared, Removed, Stored
from kvcache.hashing import hash_blocks, root_hash
from tests.integration.engines.vllm_engine.prompts import Alone
from tests.integration.engines.vllm_engine.running import HASH_SEED, Running, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]


def picture(running: Running) -> set[int]:
    """The hashes that an observer of all events believes in."""
    held: set[int] = set()
    for event in running.events:
        match event:
            case Stored(_, hashes):
                assert held.isdisjoint(hashes), "a block is stored once"
                held.update(hashes)
            case Removed(hashes):
                assert held.issuperset(hashes), "a block is removed once"
                held.difference_update(hashes)
            case Cleared():
                held.clear()
    return held


def sequence_hashes(running: Running, tokens: list[int]) -> list[int]:
    """As the frontend computes them."""
    block_format = running.info.format
    root = root_hash(block_format.model_fingerprint, seed=HASH_SEED)
    return hash_blocks(tokens, block_format.block_size, root, HASH_SEED)


async def test_events_follow_the_block_pool_through_reuse_and_eviction(d: Running) -> None:
    """The pool holds 182 blocks; the prompts need 480, share prefixes, and push one another out."""
    chance = random.Random(1)
    stems = [[chance.randrange(100, 40000) for _ in range(320)] for _ in range(6)]
    prompts = [stem + [chance.randrange(100, 40000) for _ in range(480)] for stem in stems for _ in range(3)]
    chance.shuffle(prompts)
    for prompt in prompts:
        believed = picture(d)
        chain = sequence_hashes(d, prompt)
        depth = next((i for i, block in enumerate(chain) if block not in believed), len(chain))
        answer = await d.answer(prompt, max_tokens=1)
        assert answer.usage.cached_tokens == depth * 32, "the engine's own look-up"
        await eventually(lambda chain=chain: picture(d).issuperset(chain))  # type: ignore[misc]
    assert any(isinstance(event, Removed) for event in d.events)
    assert 0 < len(picture(d)) <= d.info.total_blocks


async def test_blocks_that_were_handed_over_are_told_of(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["prefix, first"]
    chain = sequence_hashes(d, case.prompt)
    await d.answer(case.prompt, kv=await p.handle(case.prompt))
    await eventually(lambda: picture(d).issuperset(chain) and picture(p).issuperset(chain))


async def test_a_reset_of_the_prefix_cache_is_told_at_once(d: Running, alone: dict[str, Alone]) -> None:
    prompt = alone["prefix, first"].prompt
    await d.answer(prompt)
    await eventually(lambda: bool(picture(d)))
    assert await d.engine.reset_prefix_cache()
    assert picture(d) == set()
    answer = await d.answer(prompt, max_tokens=1)
    assert answer.usage.cached_tokens == 0
    await eventually(lambda: picture(d) == set(sequence_hashes(d, prompt)))


async def test_the_cache_is_not_reset_under_a_running_request(d: Running, alone: dict[str, Alone]) -> None:
    request_id, answer = await d.begin(alone["short"].prompt, SamplingParams(max_tokens=900, ignore_eos=True))
    await eventually(lambda: bool(answer.tokens))
    assert not await d.engine.reset_prefix_cache()
    d.engine.abort(request_id)
    await d.nothing_held()


async def test_a_hole_that_cannot_be_filled_ends_in_an_empty_cache_and_a_true_picture(
    d: Running, alone: dict[str, Alone]
) -> None:
    prompt = alone["1500 tokens"].prompt
    await d.answer(prompt, max_tokens=1)
    await eventually(lambda: picture(d) == set(sequence_hashes(d, prompt)))
    reader = d.engine._events
    assert reader is not None
    reader._give_up(reader._next_seq)
    assert picture(d) == set()
    # The next batch of events is the occasion for the reset that is owed.
    other = alone["prefix, first"].prompt
    await d.answer(other, max_tokens=1)
    await eventually(lambda: not reader._reset_owed)
    answer = await d.answer(prompt, max_tokens=1)
    assert answer.usage.cached_tokens == 0
    await eventually(lambda: picture(d).issuperset(sequence_hashes(d, prompt)))
