"""The router's own decisions under the virtual clock, with news that comes as late as in life. Pure.

News is looked at only when a decision is to be made, each piece as of the moment it came: the same picture, for less.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from controlplane.instances import Instance, ModelCard, State
from engines.base import LoadSnapshot
from engines.sim.profile import Profile
from kvcache.events import KvEvent
from kvcache.format import KvFormat
from kvcache.index import Holder, KvIndex
from kvcache.load import LoadReport
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.scheduler import Decision, Request, Scheduler
from services.router.settings import RouterSettings
from services.router.workers import Roster
from simulator.worker import SimWorker

__all__ = ["MODEL", "VirtualRouter"]

MODEL = "sim"
EVENTS_S = 0.006
"""A worker gathers KV events for 5 ms; the bus takes about one more."""
LOAD_S = 0.001
OUTCOMES_S = 0.05
"""A frontend gathers outcomes so long."""


class VirtualRouter:
    """One router, all of whose state is its own classes'."""

    def __init__(self, settings: RouterSettings, workers: Collection[SimWorker], profile: Profile, block_size: int,
                 seed: int) -> None:  # fmt: skip
        self._index = KvIndex()
        self._news: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._told = 0
        self._holders: dict[str, Holder] = {
            worker.instance_id: self._index.open(worker.instance_id) for worker in workers
        }
        roster = Roster()
        roster.update(_instance(worker, profile, block_size) for worker in workers)
        self._scheduler = Scheduler(
            POLICIES[settings.policy](Parameters()),
            settings.remote_prefill_min_tokens,
            roster=roster,
            index=self._index,
            book=Book(settings.placement_ttl_s),
            predictions=Predictions(),
            chance=random.Random(seed),
        )

    def schedule(self, request_id: str, hashes: Sequence[int], prompt_tokens: int, now: float) -> Decision:
        """Places one request, knowing what can be known by now."""
        news = self._news
        while news and news[0][0] <= now:
            _, _, take, arguments = heapq.heappop(news)
            take(*arguments)
        return self._scheduler.schedule(Request(request_id, MODEL, hashes, prompt_tokens), now)

    def events(self, instance_id: str, events: list[KvEvent], now: float) -> None:
        """A worker says what it stored and removed."""
        self._tell(now + EVENTS_S, self._apply, instance_id, events)

    def load(self, instance_id: str, load: LoadSnapshot, now: float) -> None:
        """A worker says how busy it is."""
        report = LoadReport(
            instance_id=instance_id,
            epoch=1,
            last_seq=0,
            held_xor=0,
            held_blocks=0,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            kv_used_blocks=load.kv_used_blocks,
            kv_total_blocks=load.kv_total_blocks,
            kv_leased_blocks=load.kv_leased_blocks,
            step_time_us=round(load.step_time_s * 1e6),
            steps=load.steps,
        )
        self._tell(now + LOAD_S, self._scheduler.report, report, now + LOAD_S)

    def prefilled(self, request_id: str, elapsed_s: float, now: float) -> None:
        """A frontend says that the prefill worker is done, so long after it was asked."""
        told = now + OUTCOMES_S
        self._tell(told, self._scheduler.prefilled, request_id, told, elapsed_s)

    def first_token(self, request_id: str, ttft_s: float, now: float) -> None:
        """A frontend says that the answer began, so long after the request came."""
        told = now + OUTCOMES_S
        self._tell(told, self._scheduler.first_token, request_id, told, ttft_s)

    def freed(self, request_id: str, now: float) -> None:
        """A frontend says that the answer ended."""
        self._tell(now + OUTCOMES_S, self._scheduler.freed, request_id)

    def _tell(self, due: float, take: Callable[..., None], *arguments: Any) -> None:
        self._told += 1
        heapq.heappush(self._news, (due, self._told, take, arguments))

    def _apply(self, instance_id: str, events: list[KvEvent]) -> None:
        holder = self._holders[instance_id]
        for event in events:
            self._index.apply(holder, event)


def _instance(worker: SimWorker, profile: Profile, block_size: int) -> Instance:
    return Instance(
        service=worker.role,
        instance_id=worker.instance_id,
        state=State.READY,
        epoch=1,
        address=worker.instance_id,
        pid=0,
        host="",
        version="",
        role=worker.role,
        model=ModelCard(
            name=MODEL,
            tokenizer="builtin",
            format=KvFormat(MODEL, "bf16", block_size, "", "sim", "1", "tp1-pp1"),
            max_model_len=profile.kv_tokens,
            vocab_size=1,
            total_blocks=worker.total_blocks,
            max_num_seqs=profile.max_num_seqs,
            max_batched_tokens=profile.max_batched_tokens,
        ),
    )
