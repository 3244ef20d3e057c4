import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.chaos.plan import FAULTS, Strike, chosen, dealt, plan_round
from controlplane.errors import SettingsError

PARTS = {
    "prefill": ["prefill-1", "prefill-2"],
    "decode": ["decode-1", "decode-2"],
    "router": ["router-1", "router-2"],
    "frontend": ["frontend-1", "frontend-2"],
    "etcd": ["etcd"],
    "nats": ["nats"],
    "clients": ["all"],
}


def _planned(seed: int, strikes: int) -> list[Strike]:
    choose = random.Random(seed)
    return plan_round(choose, dealt(choose, FAULTS), PARTS, strikes=strikes, spacing_s=3)


def test_every_fault_has_its_turn_before_one_comes_again() -> None:
    planned = _planned(1, strikes=2 * len(FAULTS))
    for half in (planned[: len(FAULTS)], planned[len(FAULTS) :]):
        assert {one.fault for one in half} == set(FAULTS)


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (_planned(5, strikes=20) for _ in range(2))
    assert one == two
    assert one != _planned(6, strikes=20)


@given(seed=st.integers(0, 10_000))
def test_of_each_role_one_part_is_well_at_any_time(seed: int) -> None:
    planned = _planned(seed, strikes=12)
    assert [one.after_s for one in planned] == sorted(one.after_s for one in planned)
    for one in planned:
        assert one.part in PARTS[one.fault.role]
        assert one.lasts_s <= one.fault.longest_s
    for part in {one.part for one in planned}:
        for before, after in pairwise(one for one in planned if one.part == part):
            assert after.after_s >= before.until_s - 1e-3
    for role, names in PARTS.items():
        of_role = [one for one in planned if one.fault.role == role]
        for before, after in pairwise(of_role if len(names) > 1 else []):
            assert before.part == after.part or after.after_s >= before.until_s + 3 - 1e-3


def test_faults_overlap_sometimes() -> None:
    planned = _planned(1, strikes=60)
    assert any(after.after_s < before.until_s for before, after in pairwise(planned))


def test_faults_that_are_to_be_apart_never_overlap() -> None:
    choose = random.Random(1)
    planned = plan_round(choose, dealt(choose, FAULTS), PARTS, strikes=60, spacing_s=3, apart=True)
    assert all(after.after_s >= before.until_s + 3 - 1e-3 for before, after in pairwise(planned))


def test_faults_are_chosen_by_name_and_pattern() -> None:
    assert [fault.name for fault in chosen("kill-decode", PARTS)] == ["kill-decode"]
    assert {fault.action for fault in chosen("kill-*, freeze-nats", PARTS)} == {"kill", "freeze"}
    assert chosen("*", PARTS) == FAULTS


def test_parts_that_are_not_there_are_not_struck() -> None:
    assert chosen("kill-prefill", PARTS | {"prefill": []}) == ()


def test_an_only_frontend_is_left_alone() -> None:
    assert not [f for f in chosen("*", PARTS | {"frontend": ["frontend"]}) if f.role == "frontend"]


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'kil-decode'.*kill-decode"):
        chosen("kil-decode", PARTS)
