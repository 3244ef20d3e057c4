from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.instances import Instance, State
from controlplane.picture import FORGET_AFTER_S, Picture


def instance(instance_id: str, state: State = State.READY) -> Instance:
    return Instance(
        service="decode", instance_id=instance_id, state=state, epoch=1, address="h:1", pid=1, host="h", version="0"
    )


def picture_of(*instances: Instance) -> Picture:
    picture = Picture()
    for one in instances:
        picture.present(one)
    return picture


def states(picture: Picture) -> dict[str, State]:
    return {instance_id: one.state for instance_id, one in picture.instances.items()}


def test_a_farewell_is_forgotten_at_once() -> None:
    picture = picture_of(instance("a"), instance("b"))
    picture.left("a")
    assert states(picture) == {"b": State.READY}


def test_one_that_vanishes_is_suspect_then_forgotten() -> None:
    picture = picture_of(instance("a"))
    picture.vanished("a", now=100)
    assert states(picture) == {"a": State.SUSPECT}
    assert picture.next_change(100) == 100 + FORGET_AFTER_S
    picture.advance(99 + FORGET_AFTER_S)
    assert states(picture) == {"a": State.SUSPECT}
    picture.advance(100 + FORGET_AFTER_S)
    assert states(picture) == {}
    assert picture.next_change(100 + FORGET_AFTER_S) is None


def test_one_that_comes_back_is_what_it_says_it_is() -> None:
    picture = picture_of(instance("a"))
    picture.vanished("a", now=100)
    picture.present(instance("a"))
    picture.advance(1000)
    assert states(picture) == {"a": State.READY}


@pytest.mark.parametrize(
    ("published", "believed"),
    [(State.STARTING, State.SUSPECT), (State.READY, State.SUSPECT), (State.DRAINING, State.DRAINING)],
)
def test_going_quiet_never_makes_a_draining_one_look_usable(published: State, believed: State) -> None:
    picture = picture_of(instance("a", published))
    picture.vanished("a", now=0)
    assert states(picture) == {"a": believed}


def test_a_failed_one_that_vanishes_is_forgotten_at_once() -> None:
    picture = picture_of(instance("a", State.FAILED))
    picture.vanished("a", now=0)
    assert states(picture) == {}


def test_who_is_missing_after_a_break_is_believed_for_a_grace_time() -> None:
    picture = picture_of(instance("a"), instance("b"), instance("c"))
    picture.listed({"b": instance("b"), "c": None}, now=0, grace_s=10)
    assert states(picture) == {"a": State.READY, "b": State.READY}
    assert picture.next_change(0) == 10
    picture.advance(10)
    assert states(picture) == {"a": State.SUSPECT, "b": State.READY}
    picture.advance(10 + FORGET_AFTER_S)
    assert states(picture) == {"b": State.READY}


def test_another_list_without_a_break_does_not_prolong_a_quiet_ones_time() -> None:
    picture = picture_of(instance("a"))
    picture.vanished("a", now=0)
    picture.listed({}, now=FORGET_AFTER_S - 1, grace_s=0)
    picture.advance(FORGET_AFTER_S)
    assert states(picture) == {}


ids = st.sampled_from("abc")
what = st.one_of(
    st.tuples(st.just("present"), ids, st.sampled_from([State.STARTING, State.READY, State.DRAINING, State.FAILED])),
    st.tuples(st.just("left"), ids, st.none()),
    st.tuples(st.just("vanished"), ids, st.none()),
)


@given(st.lists(what))
def test_whatever_happened_all_who_are_quiet_are_forgotten_in_the_end(story: list[tuple[str, str, State]]) -> None:
    picture = Picture()
    there: set[str] = set()
    for now, (event, instance_id, state) in enumerate(story):
        match event:
            case "present":
                picture.present(instance(instance_id, state))
                there.add(instance_id)
            case "left":
                picture.left(instance_id)
                there.discard(instance_id)
            case _:
                picture.vanished(instance_id, now)
                there.discard(instance_id)
        picture.advance(now)
        assert there <= picture.instances.keys()
        assert all(picture.instances[one].state is not State.SUSPECT for one in there)
    picture.advance(len(story) + FORGET_AFTER_S)
    assert picture.instances.keys() == there
