from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.events import Tier
from services.router.timing import Timing, Timings, pairs_of

KIND = ("model", "decode")


def truth(tokens: float, pairs: float, slower: float = 1.0) -> float:
    """8B on one H100, about."""
    return slower * (0.02 + 4e-5 * tokens + 1.3e-9 * pairs)


def sample(chance: random.Random) -> tuple[int, float]:
    prompt = round(math.exp(chance.uniform(math.log(200), math.log(60_000))))
    return prompt, pairs_of(prompt, prompt)


def teach(timing: Timing, chance: random.Random, times: int, *, slower: float = 1.0, noise: float = 0.05) -> None:
    for _ in range(times):
        tokens, pairs = sample(chance)
        timing.learn_prefill(tokens, pairs, truth(tokens, pairs, slower) * math.exp(chance.gauss(0, noise)))


def worst_error(timing: Timing, slower: float = 1.0) -> float:
    """Relative, over prompts of ordinary lengths."""
    errors = []
    for tokens in (1_000, 5_000, 20_000, 50_000):
        expected = truth(tokens, pairs_of(tokens, tokens), slower)
        errors.append(abs(timing.prefill_s(tokens, pairs_of(tokens, tokens)) - expected) / expected)
    return max(errors)


def test_pairs_are_those_of_uncached_tokens_with_all_before_them() -> None:
    assert pairs_of(100, 100) == 100 * 100 / 2
    assert pairs_of(10, 100) == 10 * 90 + 10 * 10 / 2
    assert pairs_of(0, 100) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_workers_speed_is_learned_from_fifty_noisy_samples(seed: int) -> None:
    timing = Timings().of("w", KIND)
    teach(timing, random.Random(seed), 50)
    assert worst_error(timing) < 0.3


@pytest.mark.parametrize("seed", range(6))
def test_a_few_stalled_requests_do_not_make_a_worker_slow(seed: int) -> None:
    chance = random.Random(seed)
    timing = Timings().of("w", KIND)
    teach(timing, chance, 60)
    for _ in range(8):
        tokens, pairs = sample(chance)
        timing.learn_prefill(tokens, pairs, 20 * truth(tokens, pairs))
        teach(timing, chance, 10)
    assert worst_error(timing) < 0.35


@pytest.mark.parametrize("slower", [0.4, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_became_slower_or_faster_is_seen_so_within_forty_samples(seed: int, slower: float) -> None:
    chance = random.Random(seed)
    timing = Timings().of("w", KIND)
    teach(timing, chance, 100)
    teach(timing, chance, 40, slower=slower)
    assert worst_error(timing, slower) < 0.4


def test_a_worker_without_samples_is_taken_to_be_the_median_of_its_kind() -> None:
    timings, chance = Timings(), random.Random(1)
    for name, slower in (("a", 1.0), ("b", 1.1), ("c", 9.0)):
        teach(timings.of(name, KIND), chance, 64, slower=slower)
    newcomer = timings.of("new", KIND)
    assert newcomer.is_measured
    assert worst_error(newcomer, 1.1) < 0.35
    stranger = timings.of("other", ("another model", "decode"))
    assert not stranger.is_measured


def test_one_sample_moves_a_newcomer_only_a_little_from_its_fellows() -> None:
    timings, chance = Timings(), random.Random(2)
    for name in "abc":
        teach(timings.of(name, KIND), chance, 64)
    newcomer = timings.of("new", KIND)
    newcomer.learn_prefill(5_000, pairs_of(5_000, 5_000), 50.0)
    assert worst_error(newcomer) < 2.0


def test_a_forgotten_worker_begins_as_its_kind_is() -> None:
    timings, chance = Timings(), random.Random(3)
    for name in "ab":
        teach(timings.of(name, KIND), chance, 64)
    teach(timings.of("slow", KIND), chance, 64, slower=8.0)
    generation = timings.generation
    timings.forget("slow")
    assert timings.generation > generation
    assert timings.known("slow") is None
    assert worst_error(timings.of("slow", KIND)) < 0.4


def test_a_step_and_a_transfer_are_learned_too() -> None:
    chance = random.Random(4)
    timing = Timings().of("w", KIND)
    for _ in range(100):
        requests, blocks, tokens = chance.randrange(1, 200), chance.randrange(100, 20_000), chance.randrange(50_000)
        timing.learn_step(requests, blocks, 0.008 + 2e-5 * requests + 4e-7 * blocks)
        timing.learn_transfer(tokens, 0.02 + 3.3e-6 * tokens)
    assert timing.step_s(100, 10_000) == pytest.approx(0.014, rel=0.1)
    assert timing.transfer_s(30_000) == pytest.approx(0.119, rel=0.1)


def test_a_tiers_weight_is_what_loading_saves_against_computing() -> None:
    timings = Timings()
    timing = timings.of("w", KIND)
    assert timing.tier_weight(Tier.DEVICE) == 1.0
    assert 1.0 > timing.tier_weight(Tier.HOST) > timing.tier_weight(Tier.DISK) > 0.0
    teach(timing, random.Random(5), 100, noise=0.0)
    for _ in range(50):
        timing.learn_load(Tier.HOST, 10_000, 10_000 * timing.per_token / 4)
        timing.learn_load(Tier.DISK, 10_000, 10_000 * timing.per_token * 3)
    assert timing.tier_weight(Tier.HOST) == pytest.approx(0.75, abs=0.05)
    assert timing.tier_weight(Tier.DISK) == 0.0


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=50))
def test_whatever_is_reported_predictions_stay_finite_and_never_negative(
    samples: list[tuple[float, float, float]],
) -> None:
    timing = Timings().of("w", KIND)
    for tokens, pairs, seconds in samples:
        timing.learn_prefill(tokens, pairs, seconds)
        timing.learn_step(tokens, pairs, seconds)
        timing.learn_transfer(tokens, seconds)
    for predicted in (timing.prefill_s(9_000, 9e7), timing.step_s(9, 900), timing.transfer_s(9_000)):
        assert math.isfinite(predicted)
        assert predicted >= 0
