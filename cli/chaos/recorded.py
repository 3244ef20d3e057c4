"""The right answers of a real model: what it says while nothing is wrong. Greedy, so that they do not change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cli.chaos.asks import Ask, Mix, asks
from cli.chaos.checker import End, Expected
from cli.chaos.clients import Client, Pieces
from controlplane.errors import Unavailable

__all__ = ["RecordedAnswers", "pool_of", "record", "repeated"]

_AT_ONCE = 4


class RecordedAnswers:
    """Answers to a pool of questions."""

    def __init__(self, answers: dict[str, Expected]) -> None:
        self._answers = answers

    def expected(self, ask: Ask) -> Expected:
        """Of a question from the pool."""
        return self._answers[ask.prompt]


def pool_of(mix: Mix, size: int) -> list[Ask]:
    """Questions whose askers are patient."""
    source = asks(0, replace(mix, hang_ups=0.0, hasty=0.0))
    return [next(source) for _ in range(size)]


def repeated(pool: Sequence[Ask], mix: Mix, seed: int) -> Iterator[Ask]:
    """The pool's questions again and again; some of their askers go away."""
    choose = random.Random(seed)
    number = 0
    while True:
        number += 1
        hang_up_after_s = choose.uniform(0.0, 10.0) if choose.random() < mix.hang_ups else None
        yield replace(choose.choice(pool), number=number, hang_up_after_s=hang_up_after_s)


async def record(client: Client, pool: Sequence[Ask]) -> tuple[list[Ask], RecordedAnswers]:
    """Asks every question twice, alone and among others; those that are answered alike both times are the pool.

    Where the two best tokens are all but equally likely, the batch that a request runs in may decide. Raises
    `Unavailable` when fewer than half are left.
    """
    alone = [await _answer(client, ask) for ask in pool]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def among_others(ask: Ask) -> Expected:
        async with turns:
            return await _answer(client, ask)

    together = await asyncio.gather(*map(among_others, pool))
    same = {ask.prompt: one for ask, one, other in zip(pool, alone, together, strict=True) if one == other}
    if len(same) * 2 < len(pool):
        raise Unavailable(f"only {len(same)} of {len(pool)} answers are the same twice; try --dtype float32")
    return [ask for ask in pool if ask.prompt in same], RecordedAnswers(same)


async def _answer(client: Client, ask: Ask) -> Expected:
    seen = await client.ask(ask, Pieces(), ask.deadline_s)
    if seen.end is not End.COMPLETE or seen.usage is None:
        raise Unavailable(f"with nothing wrong a request {seen.end}: {seen.why}")
    return Expected(seen.text, *seen.usage, seen.finish)
