"""Holds requests back while every worker is full, and places them as soon as it is their turn.

What waits here and what waits at the workers share one bound: whoever cannot be expected to be begun within
`max_wait_s`, both waits together, is refused at once. Late answers are as good as none, and a queue that is let grow
serves everybody late.

One waiting room a model: a model that is overloaded holds up no other. Whatever may have made room (something was
freed, a load report, a new worker) calls `wake`; the rooms are then served once, in the loop's next turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.errors import DeadlineExceeded, Overloaded, TokenmillError
from services.router.scheduler import Decision, NoRoom, Request, Scheduler
from services.router.waiting_room import ANYWHERE, Ticket, WaitingRoom

__all__ = ["Queues"]

AT_ONCE = 16
"""Requests placed before others get the event loop."""
WAIT_BOUNDS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(Ticket):
    request: Request
    turn: asyncio.Future[Decision]


@dataclass(slots=True)
class _Queue:
    room: WaitingRoom[_Waiting]
    full: set[Hashable] = field(default_factory=set)
    """Where there was no room when last tried, and nothing has been freed since."""


class Queues:
    """Owns the waiting rooms. Everything happens on the event loop's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_requests: int,
        max_tokens: int,
        max_wait_s: float = math.inf,
        registry: CollectorRegistry,
    ) -> None:
        """With `max_requests` 0 nobody waits here: workers queue."""
        self._scheduler = scheduler
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        self._metrics = _Metrics(registry, self)
        self._queues: dict[str, _Queue] = {}
        """By model, of those for which somebody ever waited."""
        self._waiting: dict[str, _Waiting] = {}
        """By request."""
        self._loop = asyncio.get_running_loop()
        self._woken = False

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(queue.room) for queue in self._queues.values())

    def waiting(self, priorities: Callable[[int], bool]) -> int:
        """Requests that wait in these classes."""
        return sum(
            count
            for queue in self._queues.values()
            for priority, count in queue.room.waiting.items()
            if priorities(priority)
        )

    def holds(self, request_id: str) -> bool:
        """Whether this request waits for its turn."""
        return request_id in self._waiting

    async def place(self, request: Request, time_left_s: Callable[[], float | None]) -> tuple[Decision, float]:
        """The decision, at once or when it is this request's turn, and how long it waited. Cancelling ends the wait.

        Raises what `Scheduler.schedule` raises; `Overloaded` when too many wait, one of a higher class needs the place,
        or it would take longer than `max_wait_s` until a worker begins it; `DeadlineExceeded` when its turn would not
        come, or has not come, within the time the request has.
        """
        queue, now = self._queues.get(request.model), time.monotonic()
        patience_s = self._max_wait_s - request.waited_s
        if queue is not None and (backlog_s := self._backlog_s(queue, request, now)):
            patience_s -= backlog_s
            if patience_s <= 0:
                self._metrics.refused("hopeless")
                raise self._too_long(queue.room, now)
        if queue is None or not len(queue.room):
            try:
                decision = self._scheduler.schedule(request, now, may_wait=self._max_requests > 0)
            except NoRoom:
                pass
            else:
                return decision, 0.0
        return await self._wait(request, time_left_s(), max(patience_s, 0.0))

    def wake(self) -> None:
        """There may be room now."""
        if self._waiting:
            for queue in self._queues.values():
                queue.full.clear()
            self._serve_soon()

    def _backlog_s(self, queue: _Queue, request: Request, now: float) -> float:
        """Until a worker begins what it is given now, by how fast the queue has emptied lately; 0: not known."""
        each_s = queue.room.seconds_each(now)
        return each_s * self._scheduler.backlog(request) if each_s else 0.0

    async def _wait(self, request: Request, time_left_s: float | None, patience_s: float) -> tuple[Decision, float]:
        now = time.monotonic()
        queue = self._queues.get(request.model)
        if queue is None:
            queue = self._queues[request.model] = _Queue(WaitingRoom(self._max_requests, self._max_tokens))
        times = [seconds for seconds in (time_left_s, request.timeout_s or None) if seconds is not None]
        own_time_s = min(times, default=math.inf)
        waiting = _Waiting(
            priority=request.priority,
            tenant=request.tenant,
            tokens=self._scheduler.uncached_tokens(request, now),
            where=_where(request),
            deadline=now + min(own_time_s, patience_s),
            request=request,
            turn=self._loop.create_future(),
        )
        if not len(queue.room):
            queue.full.clear()  # known of earlier times
        try:
            displaced = queue.room.enter(waiting, now)
        except TokenmillError as refusal:
            self._metrics.refused("full" if isinstance(refusal, Overloaded) else "hopeless")
            if isinstance(refusal, DeadlineExceeded) and own_time_s > patience_s:
                raise self._too_long(queue.room, now) from None
            raise
        for one in displaced:
            self._metrics.refused("displaced")
            one.turn.set_exception(
                Overloaded(
                    "every worker is full, and the place in the queue was needed for another; try again later",
                    retry_after_s=queue.room.retry_after_s(now),
                )
            )
        if not queue.full & {ANYWHERE, waiting.where}:
            self._serve_soon()
        try:
            return await self._turn(queue, waiting), time.monotonic() - waiting.entered_at
        except DeadlineExceeded:
            if own_time_s > patience_s:
                raise self._too_long(queue.room, time.monotonic()) from None
            raise

    def _too_long(self, room: WaitingRoom[_Waiting], now: float) -> Overloaded:
        """It is not the request that has no time: nobody is to wait so long."""
        return Overloaded(
            f"every worker is full, and a first token takes longer than the {self._max_wait_s:g} s that one may wait; "
            "try again later",
            retry_after_s=room.retry_after_s(now),
        )

    async def _turn(self, queue: _Queue, waiting: _Waiting) -> Decision:
        deadline = waiting.deadline - waiting.entered_at
        request_id = waiting.request.request_id
        self._waiting[request_id] = waiting
        try:
            async with asyncio.timeout(deadline if deadline < float("inf") else None):
                decision = await waiting.turn
        except TimeoutError:
            self._metrics.refused("timeout")
            now = time.monotonic()
            raise DeadlineExceeded(
                f"every worker was full for {now - waiting.entered_at:.1f} s, all the time this request had",
                param="timeout_ms",
                retry_after_s=queue.room.retry_after_s(now),
            ) from None
        finally:
            queue.room.leave(waiting, time.monotonic())
            if self._waiting.get(request_id) is waiting:
                del self._waiting[request_id]
        self._metrics.waited.observe(time.monotonic() - waiting.entered_at)
        return decision

    def _serve_soon(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._woken = False
        turns = AT_ONCE
        for queue in self._queues.values():
            turns -= self._serve_one(queue, turns)
        if turns <= 0:
            self._serve_soon()

    def _serve_one(self, queue: _Queue, turns: int) -> int:
        """Places whoever's turn it is, `turns` at most; returns how many."""
        placed = 0
        while placed < turns and (waiting := queue.room.next(queue.full)) is not None:
            now = time.monotonic()
            try:
                decision = self._scheduler.schedule(waiting.request, now, may_wait=True)
            except NoRoom:
                queue.full.add(waiting.where)
                continue
            except TokenmillError as error:  # its worker is gone, or its model
                queue.room.leave(waiting, now)
                waiting.turn.set_exception(error)
                continue
            placed += 1
            queue.room.take(waiting, now)
            waiting.turn.set_result(decision)
        return placed


class _Metrics:
    def __init__(self, registry: CollectorRegistry, queues: Queues) -> None:
        self.waited = Histogram(
            "tokenmill_router_queue_wait_seconds",
            "Time until there was room, of requests that had to wait and were placed",
            buckets=WAIT_BOUNDS_S,
            registry=registry,
        )
        self._refusals = Counter(
            "tokenmill_router_queue_refusals",
            "Requests refused because every worker was full",
            ["reason"],
            registry=registry,
        )
        waiting = Gauge(
            "tokenmill_router_queue_requests", "Requests that wait for room", ["priority"], registry=registry
        )
        waiting.labels("low").set_function(lambda: queues.waiting(lambda priority: priority < 0))
        waiting.labels("default").set_function(lambda: queues.waiting(lambda priority: priority == 0))
        waiting.labels("high").set_function(lambda: queues.waiting(lambda priority: priority > 0))

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()


def _where(request: Request) -> Hashable:
    """What narrows down the workers that come into question."""
    only = (
        request.lora,
        request.pinned,
        request.session_id if request.session_hard else "",
        tuple(sorted(request.labels.items())),
        tuple(sorted(request.capabilities)),
        tuple(sorted(request.excluded)),
    )
    return only if any(only) else ANYWHERE
