"""The load of a chaos run: clients that ask, come back when they may, and go away; each answer is checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from cli.chaos.asks import Ask
from cli.chaos.checker import End, Expected, Judgement, Seen, judge
from cli.chaos.clients import Client, Pieces

__all__ = ["Answers", "Load", "Record"]

GRACE_S = 10.0
"""A request that has not ended so long after its deadline has hung."""
_MOST_AT_ONCE = 256
_AGAIN_S = 0.1
"""Before another frontend is asked."""

Disturbed = Callable[[float, float], Collection[str]]
"""The roles that faults were at work on between two times."""


class Answers(Protocol):
    """Knows the right answers."""

    def expected(self, ask: Ask) -> Expected:
        """To this question."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request, from its first attempt to its verdict."""

    ask: Ask
    began: float
    ended: float
    worst_gap: tuple[float, float]
    attempts: tuple[Seen, ...]
    judgement: Judgement


@dataclass(slots=True)
class _Live:
    """A request under way."""

    ask: Ask
    scope: asyncio.Timeout
    hung_up: bool = False
    pieces: Pieces = field(default_factory=Pieces)
    attempts: list[Seen] = field(default_factory=list)


class Load:
    """Requests at random times, `rate_s` a second on average."""

    def __init__(
        self, clients: Sequence[Client], asks: Iterator[Ask], answers: Answers, rate_s: float, disturbed: Disturbed
    ) -> None:
        self.records: list[Record] = []
        self._clients = clients
        self._asks = asks
        self._answers = answers
        self._rate_s = rate_s
        self._disturbed = disturbed
        self._choose = random.Random(0)
        self._live: dict[int, _Live] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Asks for as long as the body runs, and then waits for the answers, each of which has its deadline."""
        async with asyncio.TaskGroup() as self._tasks:
            arriving = self._tasks.create_task(self._arrive(self._tasks))
            try:
                yield
            finally:
                arriving.cancel()

    def burst(self, count: int) -> None:
        """Asks so many at once."""
        assert self._tasks is not None, "the load does not run"
        for _ in range(min(count, _MOST_AT_ONCE - len(self._live))):
            self._tasks.create_task(self._request(next(self._asks)))

    def hang_up(self) -> None:
        """Every client goes away."""
        for live in self._live.values():
            live.hung_up = True
            live.scope.reschedule(asyncio.get_running_loop().time())

    def streams(self) -> int:
        """Answers that have begun to come, and go on."""
        return sum(1 for live in self._live.values() if live.ask.stream and live.pieces.texts)

    async def _arrive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(self._choose.expovariate(self._rate_s))
            if len(self._live) < _MOST_AT_ONCE:
                tasks.create_task(self._request(next(self._asks)))

    async def _request(self, ask: Ask) -> None:
        began = time.monotonic()
        limit_s = ask.deadline_s + GRACE_S if ask.hang_up_after_s is None else ask.hang_up_after_s
        live = _Live(ask, asyncio.timeout(limit_s), hung_up=ask.hang_up_after_s is not None)
        self._live[ask.number] = live
        try:
            async with live.scope:
                await self._attempts(live, began)
        except TimeoutError:
            live.attempts.append(live.pieces.seen(End.HUNG_UP if live.hung_up else End.SILENT))
        finally:
            del self._live[ask.number]
        ended = time.monotonic()
        attempts = tuple(live.attempts)
        judgement = judge(ask, self._answers.expected(ask), attempts, self._disturbed(began, ended))
        self.records.append(Record(ask, began, ended, live.pieces.worst_gap, attempts, judgement))

    async def _attempts(self, live: _Live, began: float) -> None:
        """Until there is an answer, an error, or no time for another attempt."""
        first = self._choose.randrange(len(self._clients))
        while True:
            client = self._clients[(first + len(live.attempts)) % len(self._clients)]
            left_s = began + live.ask.deadline_s - time.monotonic()
            live.pieces = Pieces(began=live.pieces.began if not live.pieces.texts else time.monotonic())
            seen = await client.ask(live.ask, live.pieces, max(left_s, 0.001))
            again_s = max(live.pieces.retry_after_s, _AGAIN_S)
            left_s = began + live.ask.deadline_s - time.monotonic()
            live.attempts.append(seen)
            if seen.end not in (End.REFUSED, End.FRONTEND_GONE) or left_s < again_s:
                return
            await asyncio.sleep(again_s)
