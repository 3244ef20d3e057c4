"""One chaos run: rounds of load and faults, each ending in a look for leaks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx

from cli.chaos.asks import Ask, Mix, asks
from cli.chaos.clients import Client
from cli.chaos.leaks import Baseline, held, most, outgrown
from cli.chaos.load import Answers, Load
from cli.chaos.plan import Fault, Strike, dealt, plan_round
from cli.chaos.recorded import pool_of, record, repeated
from cli.chaos.report import Gap, Happened, Report, calm_gap, rows
from cli.chaos.sim_answers import SimAnswers
from cli.chaos.strikes import Striker
from cli.chaos.suite import Suite, marked_processes
from controlplane.errors import DeadlineExceeded

__all__ = ["Course", "run"]

_START_TIMEOUT_S = 300.0
_POOL = 16
_HANDOFFS = "tokenmill_kv_handoffs_total "
_POLL_S = 0.25
_AFTER_LAST_STRIKE_S = 2.0


@dataclass(frozen=True, slots=True)
class Course:
    """What a run is to be."""

    seed: int
    seconds: float
    rate_s: float
    mix: Mix
    faults: Sequence[Fault]
    strikes: int
    """In a round."""
    spacing_s: float
    apart: bool
    """Each fault is over before the next, so that what clients met is told of the right one."""
    most_lease_s: float
    """Longest that anything may be held for somebody who never comes."""
    recovery_s: float
    """Longest that a part may take until it is at work again."""


async def run(suite: Suite, course: Course, sim: SimAnswers | None, say: Callable[[str], None]) -> Report:
    """Starts the suite, lets faults loose on it for as long as the course says, and ends it.

    Of a real model the right answers are asked first, while nothing is wrong.
    """
    began = time.monotonic()
    async with suite, AsyncExitStack() as stack:
        await suite.until_well(suite.everybody, _START_TIMEOUT_S)
        say(f"the suite is up after {time.monotonic() - began:.1f} s")
        model = await suite.model()
        clients = [await stack.enter_async_context(Client(frontend, model)) for frontend in suite.frontends]
        striker: Striker

        def disturbed(since: float, until: float) -> set[str]:
            return striker.disturbed(since, until)

        questions, answers = await _questions(clients[0], course, sim)
        load = Load(clients, questions, answers, course.rate_s, disturbed)
        striker = Striker(suite, load, course.recovery_s, say)
        leaks = await _rounds(suite, course, load, striker, say)
        handoffs = await _handoffs(suite)
        load_average = os.getloadavg()[0]
        say("stopping the suite")
    leaks += [f"process {pid} ({command[:120]}) is left" for pid, command in marked_processes(suite.mark).items()]
    now = time.monotonic()
    happened = [Happened(one.name, one.began, one.over or now, one.well, one.streams) for one in striker.struck]
    gaps = [Gap(*record.worst_gap) for record in load.records if record.ask.stream]
    return Report(
        seed=course.seed,
        seconds=now - began,
        judgements=[record.judgement for record in load.records],
        attempts=sum(len(record.attempts) for record in load.records),
        leaks=leaks,
        unrecovered=striker.unrecovered,
        rows=rows(happened, gaps),
        calm_gap_s=calm_gap(happened, gaps),
        handoffs=handoffs,
        load_average=round(load_average, 2),
    )


async def _questions(client: Client, course: Course, sim: SimAnswers | None) -> tuple[Iterator[Ask], Answers]:
    if sim is not None:
        return asks(course.seed, course.mix), sim
    pool, answers = await record(client, pool_of(course.mix, _POOL))
    return repeated(pool, course.mix, course.seed), answers


async def _rounds(suite: Suite, course: Course, load: Load, striker: Striker, say: Callable[[str], None]) -> list[str]:
    """Returns what leaked."""
    choose = random.Random(course.seed)
    faults = dealt(choose, course.faults)
    leaks: list[str] = []
    warm_up_s = min(5.0, course.seconds / 10)
    async with load.running():
        await asyncio.sleep(warm_up_s)
    leaks += await _left(suite, course, {})
    baselines = {role: most(await _all_metrics(suite, role)) for role in _service_roles(suite)}
    ends = time.monotonic() + course.seconds - warm_up_s
    number = 0
    while time.monotonic() < ends:
        number += 1
        planned = plan_round(
            choose, faults, suite.roles, strikes=course.strikes, spacing_s=course.spacing_s, apart=course.apart
        )  # fmt: skip
        async with load.running():
            async with asyncio.TaskGroup() as tasks:
                for strike in planned:
                    tasks.create_task(_at_its_time(striker, strike))
            await asyncio.sleep(_AFTER_LAST_STRIKE_S)
        try:
            await suite.until_well(suite.everybody, _START_TIMEOUT_S)
        except DeadlineExceeded as error:
            striker.unrecovered.append(f"after round {number}: {error.message}")
            break
        found = await _left(suite, course, baselines)
        leaks += [f"after round {number}: {leak}" for leak in found]
        say(f"round {number}: {len(load.records)} requests so far" + (f"; leaked: {found}" if found else ""))
    return leaks


async def _at_its_time(striker: Striker, strike: Strike) -> None:
    await asyncio.sleep(strike.after_s)
    await striker.strike(strike)


def _service_roles(suite: Suite) -> set[str]:
    return {part.role for part in suite.parts}


async def _all_metrics(suite: Suite, role: str) -> list[Mapping[str, float]]:
    return [await suite.metrics(part) for part in suite.parts if part.role == role]


async def _handoffs(suite: Suite) -> Counter[str]:
    counts: Counter[str] = Counter()
    for metrics in await _all_metrics(suite, "decode"):
        for name, value in metrics.items():
            if name.startswith(_HANDOFFS) and value:
                counts[name.removeprefix(_HANDOFFS)] += int(value)
    return counts


async def _left(suite: Suite, course: Course, baselines: Mapping[str, Baseline]) -> list[str]:
    """What an idle suite still holds once every lease is over, and what has grown past its bound."""
    deadline = time.monotonic() + course.most_lease_s
    while True:
        found = []
        for part in suite.parts:
            try:
                metrics = await suite.metrics(part)
            except httpx.HTTPError as error:
                found.append(f"{part.name} tells no metrics: {type(error).__name__}")
                continue
            found += [f"{part.name}: {text}" for text in held(metrics)]
            found += [f"{part.name}: {text}" for text in outgrown(baselines.get(part.role, {}), metrics)]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)
