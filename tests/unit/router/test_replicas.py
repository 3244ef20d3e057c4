from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
from google.protobuf.message import DecodeError

from controlplane.instances import Instance, ModelCard, State
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.replica_bus import notices_from_bytes, notices_to_bytes
from services.router.replicas import MOST_AT_ONCE, Event, Notices, Part, Placed, Replicas, Settled
from services.router.scheduler import Request, Scheduler
from services.router.sessions import Sessions
from services.router.workers import Roster

BLOCK = 16
FORMAT = KvFormat("fingerprint", "float32", BLOCK, "nhd", "test", "1", "tp1-pp1")


def worker(name: str) -> Instance:
    role = "prefill" if name.startswith("p") else "decode"
    card = ModelCard("model", "builtin", FORMAT, 8192, 1000, 100_000, 256, 2048)
    return Instance(role, name, State.READY, 1, f"{name}:1", 1, "host", "0", role, model=card)


class Router:
    """All the state of a router and none of its wires."""

    def __init__(self, name: str, workers: Sequence[str], epoch: int = 1) -> None:
        self.name = name
        self.index, self.book, self.predictions = KvIndex(), Book(60), Predictions()
        self.sessions = Sessions()
        roster = Roster()
        roster.update(map(worker, workers))
        self.scheduler = Scheduler(
            POLICIES["lmetric"](Parameters()), 0,
            roster=roster, index=self.index, book=self.book, predictions=self.predictions, chance=random.Random(3),
            sessions=self.sessions,
        )  # fmt: skip
        self.holders = {one: self.index.open(one) for one in workers}
        self.replicas = Replicas(name, epoch, self.book, self.predictions, self.sessions)

    def schedule(self, request_id: str, hashes: Sequence[int], now: float, *, session_id: str = "") -> str:
        request = Request(request_id, "model", hashes, len(hashes) * BLOCK + 1, session_id=session_id)
        decision = self.scheduler.schedule(request, now)
        self.replicas.placed(decision)
        return decision.decode.worker.instance_id

    def settled(self, request_id: str, event: Event, now: float) -> None:
        match event:
            case Event.PREFILLED:
                self.scheduler.prefilled(request_id, now)
            case Event.FIRST_TOKEN:
                self.scheduler.first_token(request_id, now)
            case Event.FREED:
                self.scheduler.freed(request_id)
        self.replicas.settled(request_id, event)

    def news(self) -> Notices:
        news = self.replicas.take()
        assert news is not None
        return notices_from_bytes(notices_to_bytes(news))


def pair(*workers: str) -> tuple[Router, Router]:
    one, other = Router("r-1", workers), Router("r-2", workers)
    for router in (one, other):
        router.replicas.keep(["r-1", "r-2"])
    return one, other


HASHES = list(range(1, 65))


def test_a_placement_counts_in_the_other_router_until_it_is_freed() -> None:
    one, other = pair("d-1")
    one.schedule("a", HASHES, 0.0)
    other.replicas.receive(one.news(), 0.0)
    mine, theirs = (replace(router.book.load("d-1")) for router in (one, other))
    assert mine == theirs
    assert mine.requests == 1
    one.settled("a", Event.FIRST_TOKEN, 1.0)
    other.replicas.receive(one.news(), 1.0)
    assert other.book.load("d-1") == one.book.load("d-1")
    assert other.book.load("d-1").queued_tokens == 0
    one.settled("a", Event.FREED, 2.0)
    other.replicas.receive(one.news(), 2.0)
    assert (len(other.book), other.book.load("d-1").requests) == (0, 0)


def test_a_prompt_of_a_prefix_that_another_router_just_placed_follows_it() -> None:
    one, other = pair(*(f"d-{at}" for at in range(8)))
    for at in range(4):
        prefix = list(range(1000 * at + 1, 1000 * at + 65))
        chosen = one.schedule(f"a-{at}", prefix, 0.0)
        one.settled(f"a-{at}", Event.FREED, 0.0)
        other.replicas.receive(one.news(), 0.0)
        assert other.schedule(f"b-{at}", prefix, 0.0) == chosen
        other.settled(f"b-{at}", Event.FREED, 0.0)


def test_a_remote_prefill_and_a_session_are_told_too() -> None:
    one, other = pair("p-1", "d-1", "d-2")
    chosen = one.schedule("a", HASHES, 0.0, session_id="s")
    other.replicas.receive(one.news(), 0.0)
    assert other.sessions.home("s", 0.0) == chosen
    assert other.book.load("p-1") == one.book.load("p-1")
    one.settled("a", Event.PREFILLED, 1.0)
    other.replicas.receive(one.news(), 1.0)
    assert other.book.load("p-1").requests == 0
    assert other.book.load(chosen) == one.book.load(chosen)


def test_placements_of_a_router_that_vanished_are_not_counted_any_more() -> None:
    one, other = pair("d-1")
    one.schedule("a", HASHES, 0.0)
    other.schedule("b", HASHES, 0.0)
    other.replicas.receive(one.news(), 0.0)
    assert other.book.load("d-1").requests == 2
    other.replicas.keep(["r-2"])
    assert other.book.load("d-1").requests == 1


def test_placements_of_a_routers_earlier_life_are_not_counted_any_more() -> None:
    one, other = pair("d-1")
    one.schedule("a", HASHES, 0.0)
    old = one.news()
    other.replicas.receive(old, 0.0)
    again = Router("r-1", ["d-1"], epoch=2)
    again.replicas.keep(["r-1", "r-2"])
    again.schedule("b", HASHES, 0.0)
    other.replicas.receive(again.news(), 0.0)
    other.replicas.receive(replace(old, seq=old.seq + 1), 0.0)
    assert other.book.load("d-1").requests == 1
    assert other.replicas.lost == 0


def test_what_comes_twice_is_taken_once_and_what_is_lost_is_counted() -> None:
    one, other = pair("d-1")
    news = []
    for at in range(5):
        one.schedule(str(at), HASHES, 0.0)
        news.append(one.news())
    for message in (news[0], news[0], news[3], news[1], news[4]):
        other.replicas.receive(message, 0.0)
    assert other.book.load("d-1").requests == 3
    assert other.replicas.lost == 2


def test_a_request_that_was_placed_again_is_not_freed_by_the_router_it_left() -> None:
    one, other = pair("d-1")
    one.schedule("a", HASHES, 0.0)
    other.replicas.receive(one.news(), 0.0)
    other.schedule("a", HASHES, 0.1)  # the frontend turned to this router
    one.settled("a", Event.FREED, 0.2)
    other.replicas.receive(one.news(), 0.2)
    assert other.book.load("d-1").requests == 1


def test_a_router_alone_keeps_no_news() -> None:
    alone = Router("r-1", ["d-1"])
    alone.replicas.keep(["r-1"])
    alone.schedule("a", HASHES, 0.0)
    alone.settled("a", Event.FREED, 0.0)
    assert alone.replicas.take() is None


def test_much_news_goes_in_several_messages() -> None:
    one, other = pair("d-1")
    for at in range(MOST_AT_ONCE + 1):
        one.schedule(str(at), HASHES, 0.0)
    for length in (MOST_AT_ONCE, 1):
        news = one.news()
        assert len(news.notices) == length
        other.replicas.receive(news, 0.0)
    assert one.replicas.take() is None
    assert other.book.load("d-1") == one.book.load("d-1")


def test_news_survives_the_wire() -> None:
    hashes = [1, 2**64 - 1]
    placed = Placed("a", Part("d", 0, 3), Part("p", 40, 4), 52, hashes, "s")
    bare = Placed("b", Part("d", 9, 1), None, 9, [], "")
    settled = [Settled("a", event) for event in Event]
    news = Notices("r", 2**63, 7, [placed, bare, *settled])
    assert notices_from_bytes(notices_to_bytes(news)) == news


@pytest.mark.parametrize("data", [b"\xff\xff", b"junk"])
def test_news_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        notices_from_bytes(data)


class Cluster:
    """Workers that compute one prompt after the other, before routers that hear of each other `delay_s` late.

    Requests come at the routers in turn. Prompts have a prefix in common with others of their group.
    """

    WORKERS = tuple(f"d-{at}" for at in range(8))
    TOKENS_A_SECOND = 10_000.0
    ANSWER_S = 2.0

    def __init__(self, routers: int, delay_s: float | None) -> None:
        names = [f"r-{at}" for at in range(routers)]
        self.routers = [Router(name, self.WORKERS) for name in names]
        for router in self.routers:
            router.replicas.keep(names if delay_s is not None else [router.name])
        self.delay_s = delay_s
        self.free_at = dict.fromkeys(self.WORKERS, 0.0)
        self.queued = dict.fromkeys(self.WORKERS, 0)
        self.running = dict.fromkeys(self.WORKERS, 0)
        self.computed = dict.fromkeys(self.WORKERS, 0)
        self.held: dict[str, set[int]] = {name: set() for name in self.WORKERS}
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._number), what))

    def run(self, requests: int, a_second: float, seed: int) -> float:
        """Returns max/mean of the tokens that the workers computed."""
        chance = random.Random(seed)
        prefixes = [[chance.getrandbits(64) for _ in range(64)] for _ in range(40)]
        now = 0.0
        for number in range(requests):
            now += chance.expovariate(a_second)
            prefix = prefixes[int(40 * chance.random() ** 2)]
            prompt = prefix + [chance.getrandbits(64) for _ in range(chance.randrange(8, 64))]
            self.at(now, lambda at, number=number, prompt=prompt: self.arrive(number, prompt, at))  # type: ignore[misc]
        for second in range(int(now) + 2):
            self.at(second + 0.5, self.report)
        while self._agenda:
            when, _, what = heapq.heappop(self._agenda)
            what(when)
        return max(self.computed.values()) / (sum(self.computed.values()) / len(self.computed))

    def arrive(self, number: int, prompt: Sequence[int], now: float) -> None:
        router = self.routers[number % len(self.routers)]
        name = router.schedule(str(number), prompt, now)
        self.tell(router, now)
        leading = next((at for at, one in enumerate(prompt) if one not in self.held[name]), len(prompt))
        tokens = (len(prompt) - leading) * BLOCK + 1
        self.computed[name] += tokens
        self.queued[name] += tokens
        self.running[name] += 1
        self.held[name].update(prompt)
        done = self.free_at[name] = max(self.free_at[name], now) + tokens / self.TOKENS_A_SECOND

        def first_token(at: float) -> None:
            self.queued[name] -= tokens
            for one in self.routers:
                one.index.store(one.holders[name], None, prompt)
            router.settled(str(number), Event.FIRST_TOKEN, at)
            self.tell(router, at)

        def freed(at: float) -> None:
            self.running[name] -= 1
            router.settled(str(number), Event.FREED, at)
            self.tell(router, at)

        self.at(done, first_token)
        self.at(done + self.ANSWER_S, freed)

    def tell(self, router: Router, now: float) -> None:
        if self.delay_s is not None and (news := router.replicas.take()) is not None:
            for other in self.routers:
                if other is not router:
                    self.at(now + self.delay_s, lambda at, other=other: other.replicas.receive(news, at))  # type: ignore[misc]

    def report(self, now: float) -> None:
        for name in self.WORKERS:
            report = LoadReport(name, 1, 0, 0, 0, self.running[name], 0, self.queued[name], 0)
            for router in self.routers:
                router.scheduler.report(report, now)


@pytest.mark.parametrize("seed", [1, 2])
def test_two_routers_balance_as_one_does(seed: int) -> None:
    one = Cluster(1, None).run(1000, 100.0, seed)
    two = Cluster(2, 0.01).run(1000, 100.0, seed)
    assert two <= one * 1.1


def test_hashes_are_little_endian_on_the_wire() -> None:
    news = Notices("r", 1, 1, [Placed("a", Part("d", 1, 1), None, 1, [0x1122], "")])
    assert (0x1122).to_bytes(8, "little") in notices_to_bytes(news)
