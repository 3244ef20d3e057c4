from itertools import islice

import pytest

from cli.chaos.asks import REAL_MODEL, asks
from cli.chaos.plan import chosen
from cli.chaos.recorded import pool_of, repeated
from cli.chaos.scenarios import SCENARIOS
from cli.chaos.sim_answers import SimAnswers
from tests.unit.cli.chaos.test_plan import PARTS


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_faults_that_it_can_make(name: str) -> None:
    scenario = SCENARIOS[name]
    assert list(filter(scenario.can_make, chosen(scenario.faults, PARTS)))


def test_only_engines_that_can_hang_are_told_to() -> None:
    (hang,) = chosen("hang-decode", PARTS)
    assert SCENARIOS["mixed"].can_make(hang)
    assert not SCENARIOS["corrupt-kv"].can_make(hang)
    assert not SCENARIOS["real-model"].can_make(hang)


def test_a_workers_link_is_spoilt_only_where_there_is_one() -> None:
    (mute,) = chosen("mute-decode", PARTS)
    assert SCENARIOS["mixed"].can_make(mute)
    assert not SCENARIOS["decode-kill"].can_make(mute)


def test_a_pools_questions_come_again_with_numbers_of_their_own() -> None:
    pool = pool_of(REAL_MODEL, 8)
    several = list(islice(repeated(pool, REAL_MODEL, seed=1), 200))
    assert {ask.prompt for ask in several} == {ask.prompt for ask in pool}
    assert len({ask.number for ask in several}) == 200
    assert any(ask.hang_up_after_s is not None for ask in several)
    assert several == list(islice(repeated(pool, REAL_MODEL, seed=1), 200))


def test_sims_answers_are_one_token_after_another_and_differ_by_prompt_and_seed() -> None:
    one, other = islice(asks(1, SCENARIOS["decode-kill"].mix), 2)
    answer = SimAnswers(0).expected(one)
    assert answer.completion_tokens == one.max_tokens == len(answer.text.split(" ")) - 1
    assert answer == SimAnswers(0).expected(one)
    assert answer.text != SimAnswers(1).expected(one).text
    assert answer.text[:50] != SimAnswers(0).expected(other).text[:50]
