from __future__ import annotations

from services.router import predictions as module
from services.router.predictions import LIFE_S, STRIDE, Predictions

PROMPT = list(range(1, 42))


def test_a_placed_prompt_is_soon_there_to_the_last_block() -> None:
    predictions = Predictions()
    predictions.add("p", PROMPT, now=100)
    assert predictions.overlaps(PROMPT, now=100) == {"p": 41}
    assert predictions.overlaps(PROMPT[:3], now=100) == {}  # below the stride: a hint may be short


def test_a_prompt_that_shares_its_beginning_is_predicted_down_to_the_stride() -> None:
    predictions = Predictions()
    predictions.add("p", PROMPT, now=100)
    other = [*PROMPT[:30], *range(1000, 1040)]
    assert predictions.overlaps(other, now=100) == {"p": 30 // STRIDE * STRIDE}
    assert predictions.overlaps(range(500, 600), now=100) == {}


def test_predictions_end_by_themselves() -> None:
    predictions = Predictions()
    predictions.add("p", PROMPT, now=100)
    predictions.add("q", PROMPT, now=100 + 1.5 * LIFE_S)
    assert predictions.overlaps(PROMPT, now=100 + 1.5 * LIFE_S) == {"p": 41, "q": 41}
    assert predictions.overlaps(PROMPT, now=100 + 2.5 * LIFE_S) == {"q": 41}
    assert predictions.overlaps(PROMPT, now=100 + 9 * LIFE_S) == {}


def test_a_lost_worker_has_no_future() -> None:
    predictions = Predictions()
    predictions.add("p", PROMPT, now=100)
    predictions.forget("p")
    assert predictions.overlaps(PROMPT, now=100) == {}
    predictions.add("p", PROMPT, now=101)
    assert predictions.overlaps(PROMPT, now=101) == {"p": 41}


def test_memory_is_bounded_however_fast_prompts_come() -> None:
    predictions = Predictions()
    for start in range(0, 10 * module.MOST_BLOCKS * STRIDE, 50_000):
        predictions.add("p", range(start + 1, start + 50_001), now=100)
        assert len(predictions) <= module.MOST_BLOCKS + 2 * 50_000 // STRIDE


def test_an_empty_prompt_predicts_nothing() -> None:
    predictions = Predictions()
    predictions.add("p", [], now=100)
    assert predictions.overlaps([], now=100) == {}
