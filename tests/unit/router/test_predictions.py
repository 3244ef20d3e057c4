from __future__ import annotations

from collections.abc import Sequence

from services.router.predictions import LIFE_S, STRIDE, Predictions, sparse

PROMPT = list(range(1, 42))


def add(predictions: Predictions, worker: str, hashes: Sequence[int], now: float) -> None:
    predictions.add_sparse(worker, sparse(hashes), now)


def overlaps(predictions: Predictions, hashes: Sequence[int], now: float) -> dict[str, int]:
    return {name: depth for depth, names in predictions.depths(hashes, now) for name in names}


def test_a_placed_prompt_is_soon_there_to_the_last_block() -> None:
    predictions = Predictions()
    add(predictions, "p", PROMPT, now=100)
    assert overlaps(predictions, PROMPT, now=100) == {"p": 41}
    assert overlaps(predictions, PROMPT[:3], now=100) == {}  # below the stride: a hint may be short


def test_a_prompt_that_shares_its_beginning_is_predicted_down_to_the_stride() -> None:
    predictions = Predictions()
    add(predictions, "p", PROMPT, now=100)
    other = [*PROMPT[:30], *range(1000, 1040)]
    assert overlaps(predictions, other, now=100) == {"p": 30 // STRIDE * STRIDE}
    assert overlaps(predictions, range(500, 600), now=100) == {}


def test_predictions_end_by_themselves() -> None:
    predictions = Predictions()
    add(predictions, "p", PROMPT, now=100)
    add(predictions, "q", PROMPT, now=100 + 1.5 * LIFE_S)
    assert overlaps(predictions, PROMPT, now=100 + 1.5 * LIFE_S) == {"p": 41, "q": 41}
    assert overlaps(predictions, PROMPT, now=100 + 2.5 * LIFE_S) == {"q": 41}
    assert overlaps(predictions, PROMPT, now=100 + 9 * LIFE_S) == {}


def test_a_lost_worker_has_no_future() -> None:
    predictions = Predictions()
    add(predictions, "p", PROMPT, now=100)
    predictions.forget("p")
    assert overlaps(predictions, PROMPT, now=100) == {}
    add(predictions, "p", PROMPT, now=101)
    assert overlaps(predictions, PROMPT, now=101) == {"p": 41}


def test_memory_is_bounded_however_fast_prompts_come() -> None:
    predictions = Predictions(max_blocks=1000)
    for start in range(0, 50_000, 500):
        add(predictions, "p", range(start + 1, start + 501), now=100)
        assert len(predictions) <= 1000
        assert overlaps(predictions, range(start + 1, start + 501), now=100) == {"p": 500}


def test_placements_on_a_worker_that_tells_nothing_are_remembered_for_longer() -> None:
    predictions = Predictions(silent_ttl_s=100)
    predictions.set_silent({"silent": 10_000})
    for worker in ("silent", "telling"):
        add(predictions, worker, PROMPT, now=0)
    assert overlaps(predictions, PROMPT, now=1) == {"silent": 41, "telling": 41}
    assert overlaps(predictions, PROMPT, now=90) == {"silent": 41}
    assert overlaps(predictions, PROMPT, now=201) == {}


def test_no_more_is_remembered_of_a_silent_worker_than_it_has_room_for_and_the_latest_stays() -> None:
    predictions = Predictions()
    predictions.set_silent({"silent": 20 * STRIDE})
    prompts = [range(1 + 1000 * at, 1 + 1000 * at + 5 * STRIDE) for at in range(9)]
    for prompt in prompts:
        add(predictions, "silent", prompt, now=0)
        assert overlaps(predictions, prompt, now=0) == {"silent": 5 * STRIDE}
        remembered = [one for one in prompts if overlaps(predictions, one, now=0)]
        assert len(remembered) <= 4
        assert len(predictions) <= 20 + 10  # some wait to be swept out
    huge = range(10**6, 10**6 + 100 * STRIDE)
    add(predictions, "silent", huge, now=0)
    assert overlaps(predictions, huge, now=0) == {"silent": 10 * STRIDE}


def test_an_empty_prompt_predicts_nothing() -> None:
    predictions = Predictions()
    add(predictions, "p", [], now=100)
    assert overlaps(predictions, [], now=100) == {}
