from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import CollectorRegistry

from controlplane.errors import DeadlineExceeded, Overloaded, Unavailable
from controlplane.instances import Instance, ModelCard, State
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from services.router.decision import Decision
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.queues import Queues
from services.router.scheduler import Request, Scheduler
from services.router.workers import Roster

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")


def worker(name: str, *, runs: int = 1, model: str = "model") -> Instance:
    card = ModelCard(model, "builtin", FORMAT, 8192, 1000, 100_000, runs, 2048)
    return Instance("decode", name, State.READY, 1, f"{name}:1", 1, "host", "0", "decode", model=card)


class Router:
    """Queues before a real scheduler; `ask` starts a call as the service does."""

    def __init__(self, *workers: Instance, most: int = 4, backlog: float = 0.0, max_wait_s: float = math.inf) -> None:
        self.roster, self.registry = Roster(), CollectorRegistry()
        self.roster.update(workers)
        self.scheduler = Scheduler(
            POLICIES["lmetric"](Parameters()), 0,
            roster=self.roster, index=KvIndex(), book=Book(60), predictions=Predictions(), chance=random.Random(1),
            worker_backlog=backlog,
        )  # fmt: skip
        self.queues = Queues(
            self.scheduler, max_requests=most, max_tokens=100_000, max_wait_s=max_wait_s, registry=self.registry
        )
        self.placed: list[str] = []
        self.calls: dict[str, asyncio.Task[tuple[Decision, float]]] = {}

    async def ask(
        self,
        name: str,
        *,
        priority: int = 0,
        tenant: str = "",
        pinned: str = "",
        model: str = "model",
        left_s: float | None = None,
        waited_s: float = 0.0,
    ) -> asyncio.Task[tuple[Decision, float]]:
        """As soon as it is placed, or waits, or was refused."""
        request = Request(name, model, [], 100, priority=priority, tenant=tenant, pinned=pinned, waited_s=waited_s)
        call = self.calls[name] = asyncio.create_task(self._place(request, left_s))
        async with asyncio.timeout(10):
            while not (call.done() or self.queues.holds(name)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        return call

    async def _place(self, request: Request, left_s: float | None) -> tuple[Decision, float]:
        placed = await self.queues.place(request, lambda: left_s)
        self.placed.append(request.request_id)
        return placed

    def free(self, name: str) -> None:
        self.scheduler.freed(name)
        self.queues.wake()

    def refused(self, reason: str) -> float:
        name = "tokenmill_router_queue_refusals_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Router]]:
    started: list[Router] = []

    def make(*workers: Instance, most: int = 4, backlog: float = 0.0, max_wait_s: float = math.inf) -> Router:
        started.append(Router(*workers, most=most, backlog=backlog, max_wait_s=max_wait_s))
        return started[-1]

    yield make
    for router in started:
        for call in router.calls.values():
            call.cancel()
        await asyncio.gather(*router.calls.values(), return_exceptions=True)


Start = Callable[..., Router]


async def test_with_room_nothing_waits(start: Start) -> None:
    router = start(worker("d-1", runs=2))
    for name in ("one", "two"):
        _, waited_s = await (await router.ask(name))
        assert waited_s == 0
    assert len(router.queues) == 0


async def test_what_is_freed_goes_to_whoever_waits_longest(start: Start) -> None:
    router = start(worker("d-1"))
    for name in ("running", "first", "second"):
        await router.ask(name)
    assert (router.placed, len(router.queues)) == (["running"], 2)
    async with asyncio.timeout(10):
        router.free("running")
        decision, waited_s = await router.calls["first"]
        assert decision.decode.worker.instance_id == "d-1"
        assert waited_s > 0
        assert router.queues.holds("second")
        router.free("first")
        await router.calls["second"]
    assert router.placed == ["running", "first", "second"]


async def test_a_backlog_is_given_to_workers_before_anybody_waits(start: Start) -> None:
    router = start(worker("d-1", runs=4), backlog=0.5)
    for turn in range(7):
        await router.ask(str(turn))
    assert (len(router.placed), len(router.queues)) == (6, 1)


async def test_an_idle_worker_takes_any_request(start: Start) -> None:
    router = start(worker("d-1", runs=4))
    request = Request("giant", "model", [], 16 * 5000)
    await router.queues.place(request, lambda: None)


async def test_a_call_that_is_cancelled_gives_up_its_place(start: Start) -> None:
    router = start(worker("d-1"))
    for name in ("running", "gone", "next"):
        await router.ask(name)
    router.calls["gone"].cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await router.calls["gone"]
        assert not router.queues.holds("gone")
        router.free("running")
        await router.calls["next"]
    assert router.placed == ["running", "next"]


async def test_a_higher_class_is_placed_first_and_displaces_when_the_room_is_full(start: Start) -> None:
    router = start(worker("d-1"), most=2)
    for name in ("running", "early", "late"):
        await router.ask(name)
    with pytest.raises(Overloaded, match="2 requests with 200 uncached tokens wait already") as full:
        await (await router.ask("more"))
    assert full.value.retry_after_s > 0
    await router.ask("urgent", priority=1)
    async with asyncio.timeout(10):
        with pytest.raises(Overloaded, match="was needed for another") as displaced:
            await router.calls["late"]
        assert displaced.value.retry_after_s > 0
        router.free("running")
        await router.calls["urgent"]
    assert router.queues.holds("early")
    assert (router.refused("full"), router.refused("displaced")) == (1, 1)


async def test_a_request_that_waits_is_refused_when_its_time_is_over(start: Start) -> None:
    router = start(worker("d-1"))
    await router.ask("running")
    async with asyncio.timeout(10):
        with pytest.raises(DeadlineExceeded, match="all the time this request had"):
            await (await router.ask("hasty", left_s=0.05))
    assert (len(router.queues), router.refused("timeout")) == (0, 1)


async def test_nobody_waits_longer_than_anyone_may_and_is_told_to_come_again(start: Start) -> None:
    router = start(worker("d-1"), max_wait_s=0.05)
    for name in ("running", "waiting"):
        await router.ask(name)
    async with asyncio.timeout(10):
        with pytest.raises(Overloaded, match=r"longer than the 0\.05 s") as refused:
            await router.calls["waiting"]
    assert refused.value.retry_after_s > 0


async def test_a_request_is_refused_at_once_where_the_backlog_alone_lasts_too_long(start: Start) -> None:
    router = start(worker("d-1"), backlog=1000.0, most=20, max_wait_s=5)
    for turn in range(1010):
        await router.ask(str(turn))
    assert len(router.queues) == 9
    async with asyncio.timeout(10):
        for turn in range(6):
            await asyncio.sleep(0.01)  # so that a thousand take 10 s at least
            router.free(str(turn))
            await router.calls[str(1001 + turn)]
        with pytest.raises(Overloaded, match=r"longer than the 5 s"):
            await (await router.ask("late"))
        router.roster.update([worker("d-1"), worker("d-2")])
        router.free("6")
        await (await router.ask("lucky"))


async def test_what_a_request_has_waited_before_counts(start: Start) -> None:
    router = start(worker("d-1"), max_wait_s=600)
    await (await router.ask("running", waited_s=600))
    async with asyncio.timeout(10):
        with pytest.raises(Overloaded, match="longer than the 600 s"):
            await (await router.ask("late", waited_s=600))


async def test_a_full_worker_holds_up_only_who_is_pinned_to_it(start: Start) -> None:
    router = start(worker("d-1"), worker("d-2"))
    for name in ("a", "b"):
        await router.ask(name)
    placed_at = {name: (await router.calls[name])[0].decode.worker.instance_id for name in ("a", "b")}
    busy, freed = placed_at["a"], placed_at["b"]
    await router.ask("pinned", pinned=busy)
    await router.ask("any")
    async with asyncio.timeout(10):
        router.free("b")
        decision, _ = await router.calls["any"]
    assert decision.decode.worker.instance_id == freed
    assert router.queues.holds("pinned")


async def test_a_model_that_is_overloaded_holds_up_no_other(start: Start) -> None:
    router = start(worker("d-1"), worker("d-2", model="other"), most=1)
    for name in ("running", "waiting"):
        await router.ask(name)
    await (await router.ask("another", model="other"))
    assert router.placed == ["running", "another"]


async def test_a_new_worker_takes_what_waits_and_a_lost_one_refuses_it(start: Start) -> None:
    router = start(worker("d-1"))
    for name in ("running", "waiting"):
        await router.ask(name)
    async with asyncio.timeout(10):
        router.roster.update([worker("d-1"), worker("d-2")])
        router.queues.wake()
        assert (await router.calls["waiting"])[0].decode.worker.instance_id == "d-2"
        await router.ask("late")
        router.roster.update([])
        router.queues.wake()
        with pytest.raises(Unavailable):
            await router.calls["late"]


async def test_without_a_queue_workers_are_given_all(start: Start) -> None:
    router = start(worker("d-1"), most=0)
    for turn in range(5):
        await (await router.ask(str(turn)))
    assert len(router.placed) == 5


async def test_nobody_is_lost_while_many_come_go_and_are_served(start: Start) -> None:
    chance = random.Random(7)
    router = start(*(worker(f"d-{at}", runs=3) for at in range(4)), most=50)
    gone = set()
    for turn in range(400):
        name = str(turn)
        await router.ask(name, priority=chance.choice([0, 0, 1]), tenant=chance.choice("ab"))
        waiting = [one for one in router.calls if router.queues.holds(one)]
        if waiting and chance.random() < 0.1:
            gone.add(victim := chance.choice(waiting))
            router.calls[victim].cancel()
        for running in [one for one in router.placed if chance.random() < 0.05]:
            router.placed.remove(running)
            router.free(running)
    async with asyncio.timeout(20):
        while len(router.queues):
            for running in router.placed[:]:
                router.placed.remove(running)
                router.free(running)
            await asyncio.sleep(0)
        ended = await asyncio.gather(*router.calls.values(), return_exceptions=True)
    assert not [one for one in ended if isinstance(one, BaseException) and not _is_expected(one)]
    assert sum(isinstance(one, asyncio.CancelledError) for one in ended) <= len(gone)


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError | Overloaded)
