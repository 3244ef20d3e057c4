from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.errors import DeadlineExceeded, Overloaded, TokenmillError
from services.router.waiting_room import ANYWHERE, LEAST_TOKENS, QUANTUM_TOKENS, Ticket, WaitingRoom

LONGEST = 6000


def ticket(
    tokens: int = 100, *, priority: int = 0, tenant: str = "", where: str = "", deadline: float = math.inf
) -> Ticket:
    return Ticket(priority=priority, tenant=tenant, tokens=tokens, where=where or ANYWHERE, deadline=deadline)


def roomy() -> WaitingRoom[Ticket]:
    return WaitingRoom(100_000, 10**9)


def drain(room: WaitingRoom[Ticket], now: float = 0.0) -> list[Ticket]:
    """Everybody, in turn."""
    taken: list[Ticket] = []
    while (one := room.next()) is not None:
        room.take(one, now)
        taken.append(one)
    return taken


def test_one_tenants_requests_keep_their_order() -> None:
    room = roomy()
    coming = [ticket(tokens) for tokens in (10, 5000, 20, 3000, 1)]
    for one in coming:
        assert room.enter(one, 0.0) == []
    assert drain(room) == coming
    assert (len(room), room.tokens, room.waiting) == (0, 0, {})


def test_a_higher_class_goes_first_however_late_it_comes() -> None:
    room = roomy()
    low, middle, high = ticket(priority=-1), ticket(), ticket(9000, priority=7)
    for one in (low, middle, high):
        room.enter(one, 0.0)
    assert room.waiting == {-1: 1, 0: 1, 7: 1}
    assert drain(room) == [high, middle, low]


def test_asking_whose_turn_it_is_changes_no_turn() -> None:
    room = roomy()
    for one in (ticket(9000, tenant="a"), ticket(9000, tenant="b"), ticket(10, tenant="b")):
        room.enter(one, 0.0)
    first = room.next()
    assert [room.next() for _ in range(100)] == [first] * 100


def test_a_request_whose_workers_are_full_holds_up_no_other() -> None:
    room = roomy()
    bound, free, last = ticket(where="worker-1"), ticket(), ticket(where="worker-2")
    for one in (bound, free, last):
        room.enter(one, 0.0)
    assert room.next() is bound
    assert room.next({"worker-1"}) is free
    room.take(free, 0.0)
    assert room.next({"worker-1"}) is last
    assert room.next({"worker-1", "worker-2"}) is None
    assert room.next({ANYWHERE}) is None  # no room anywhere is none on those two


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(LEAST_TOKENS, LONGEST)), min_size=30, max_size=120),
)
def test_tenants_that_always_wait_get_equal_tokens(sizes: Sequence[tuple[str, int]]) -> None:
    room = roomy()
    for tenant, tokens in sizes:
        room.enter(ticket(tokens, tenant=tenant), 0.0)
    left = Counter(tenant for tenant, _ in sizes)
    served: Counter[str] = Counter(dict.fromkeys(left, 0))
    while len(left) > 1 and min(left.values()) > 0:
        # Within the round that goes on, some had their turn and others not yet.
        assert max(served.values()) - min(served.values()) <= QUANTUM_TOKENS + 2 * LONGEST
        one = room.next()
        assert one is not None
        room.take(one, 0.0)
        served[one.tenant] += one.tokens
        left[one.tenant] -= 1


def test_a_tenant_of_many_short_requests_does_not_hold_up_one_of_few_long_ones() -> None:
    room = roomy()
    flood = [ticket(100, tenant="flood") for _ in range(1000)]
    for one in flood:
        room.enter(one, 0.0)
    late = ticket(2000, tenant="late")
    room.enter(late, 0.0)
    before = drain(room).index(late)
    assert before <= QUANTUM_TOKENS // 100


def test_a_turn_is_not_saved_up_while_nothing_waits() -> None:
    room = roomy()
    room.enter(ticket(LEAST_TOKENS, tenant="a"), 0.0)
    drain(room)
    room.enter(ticket(3000, tenant="b"), 0.0)
    room.enter(ticket(3000, tenant="a"), 0.0)
    assert [one.tenant for one in drain(room)] == ["b", "a"]


def test_a_full_room_refuses_and_says_when_to_come_again() -> None:
    room: WaitingRoom[Ticket] = WaitingRoom(2, 1000)
    room.enter(ticket(400), 0.0)
    with pytest.raises(
        Overloaded, match="1 requests with 400 uncached tokens wait already, of 2 and 1000"
    ) as by_tokens:
        room.enter(ticket(700), 0.0)
    assert by_tokens.value.retry_after_s > 0
    room.enter(ticket(500), 0.0)
    with pytest.raises(Overloaded):
        room.enter(ticket(20), 0.0)
    assert (len(room), room.tokens) == (2, 900)


def test_a_prompt_longer_than_the_room_may_wait_alone() -> None:
    room: WaitingRoom[Ticket] = WaitingRoom(10, 1000)
    giant = ticket(1_000_000)
    room.enter(giant, 0.0)
    with pytest.raises(Overloaded):
        room.enter(ticket(10), 0.0)
    assert drain(room) == [giant]


def test_a_newcomer_displaces_the_newest_of_the_lowest_class() -> None:
    room: WaitingRoom[Ticket] = WaitingRoom(4, 10_000)
    oldest, low, newest, same = ticket(priority=-2), ticket(priority=-1), ticket(priority=-2), ticket()
    for one in (oldest, low, newest, same):
        room.enter(one, 0.0)
    assert room.enter(ticket(), 0.0) == [newest]
    assert room.enter(ticket(), 0.0) == [oldest]
    assert room.enter(ticket(), 0.0) == [low]
    with pytest.raises(Overloaded):
        room.enter(ticket(), 0.0)


def test_nobody_is_displaced_for_one_that_is_refused_all_the_same() -> None:
    room: WaitingRoom[Ticket] = WaitingRoom(10, 1000)
    room.enter(ticket(100, priority=-1), 0.0)
    room.enter(ticket(900), 0.0)
    with pytest.raises(Overloaded):
        room.enter(ticket(500), 0.0)
    assert room.waiting == {-1: 1, 0: 1}


def test_a_tenant_that_fills_the_room_gives_way_to_another_until_they_are_equal() -> None:
    room: WaitingRoom[Ticket] = WaitingRoom(4, 100_000)
    greedy = [ticket(tenant="greedy") for _ in range(4)]
    for one in greedy:
        room.enter(one, 0.0)
    with pytest.raises(Overloaded):
        room.enter(ticket(tenant="greedy"), 0.0)
    assert room.enter(ticket(tenant="modest"), 0.0) == [greedy[3]]
    assert room.enter(ticket(tenant="modest"), 0.0) == [greedy[2]]
    with pytest.raises(Overloaded):
        room.enter(ticket(tenant="modest"), 0.0)


def test_a_hopeless_request_is_refused_at_once() -> None:
    room = roomy()
    for _ in range(10):
        room.enter(ticket(1000), 0.0)
    hasty = ticket(1000, deadline=5.0)
    assert room.expected_wait_s(hasty, 0.0) is None  # nothing is known yet: it may try
    for second in range(1, 7):
        head = room.next()
        assert head is not None
        room.take(head, float(second))
    assert room.expected_wait_s(ticket(1000), 6.0) == pytest.approx(4.0, rel=0.1)
    with pytest.raises(DeadlineExceeded, match="a turn is expected in 4") as refused:
        room.enter(ticket(1000, deadline=8.0), 6.0)
    assert refused.value.retry_after_s == pytest.approx(4.0, rel=0.1)
    room.enter(ticket(1000, deadline=12.0), 6.0)
    room.enter(ticket(1000, deadline=8.0, priority=1), 6.0)  # all others would wait for it
    room.enter(ticket(100, deadline=7.5, tenant="another"), 6.0)  # its turn comes before all of the first tenant's


def test_the_rate_of_long_ago_is_forgotten() -> None:
    room = roomy()
    for _ in range(10):
        room.enter(ticket(1000), 0.0)
    drain(room, 1.0)
    room.enter(ticket(1000), 200.0)
    assert room.expected_wait_s(ticket(1000), 200.0) is None


def test_who_left_before_its_turn_is_gone() -> None:
    room = roomy()
    first, second = ticket(), ticket()
    room.enter(first, 0.0)
    room.enter(second, 0.0)
    room.leave(first, 0.0)
    room.leave(first, 0.0)
    assert first not in room
    assert drain(room) == [second]


class Room(RuleBasedStateMachine):
    """Whoever enters is in the room until it is taken, leaves or is displaced, each once; the bounds hold always."""

    def __init__(self) -> None:
        super().__init__()
        self.room: WaitingRoom[Ticket] = WaitingRoom(8, 10_000)
        self.inside: list[Ticket] = []
        self.now = 0.0

    @rule(
        tokens=st.integers(0, LONGEST),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("abc"),
        where=st.sampled_from(["", "", "one", "two"]),
        patience=st.sampled_from([math.inf, 1.0, 100.0]),
    )
    def enters(self, tokens: int, priority: int, tenant: str, where: str, patience: float) -> None:
        one = ticket(tokens, priority=priority, tenant=tenant, where=where, deadline=self.now + patience)
        try:
            displaced = self.room.enter(one, self.now)
        except TokenmillError:
            return
        for victim in displaced:
            self.inside.remove(victim)
            assert victim.priority < priority or (victim.priority == priority and victim.tenant != tenant)
        assert (
            not displaced
            or len(self.inside) + len(displaced) == 8
            or sum(victim.tokens for victim in displaced) + sum(other.tokens for other in self.inside) + one.tokens
            > 10_000
        )
        self.inside.append(one)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.inside))
        self.room.leave(one, self.now)
        self.inside.remove(one)

    @rule(full=st.sets(st.sampled_from(["one", "two"])))
    def is_served(self, full: set[str]) -> None:
        one = self.room.next(full)
        able = [other for other in self.inside if other.where not in full]
        if one is None:
            assert not able
            return
        assert one in able
        assert one.priority == max(other.priority for other in able)
        assert one is next(other for other in able if (other.priority, other.tenant) == (one.priority, one.tenant))
        self.room.take(one, self.now)
        self.inside.remove(one)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_true(self) -> None:
        assert len(self.room) == len(self.inside) <= 8
        assert self.room.tokens == sum(one.tokens for one in self.inside) <= 10_000
        assert self.room.waiting == Counter(one.priority for one in self.inside)
        assert all(one in self.room for one in self.inside)


Room.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_the_room = Room.TestCase
