"""The router's own decisions under the virtual clock, with news that comes as late as in life. Pure.

News is looked at only when a decision is to be made, each piece as of the moment it came: the same picture, for less.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.errors import DeadlineExceeded, Overloaded
from controlplane.instances import Instance, ModelCard, State
from engines.base import LoadSnapshot
from engines.sim.profile import Profile
from kvcache.events import KvEvent
from kvcache.format import KvFormat
from kvcache.index import Holder, KvIndex
from kvcache.load import LoadReport
from services.router.placements import Book
from services.router.policies import POLICIES
from services.router.predictions import Predictions
from services.router.scheduler import Decision, NoRoom, Request, Scheduler
from services.router.settings import RouterSettings
from services.router.waiting_room import Ticket, WaitingRoom
from services.router.workers import Roster
from simulator.clock import PS, Timeline
from simulator.worker import SimWorker

__all__ = ["MODEL", "VirtualRouter"]

MODEL = "sim"
EVENTS_S = 0.006
"""A worker gathers KV events for 5 ms; the bus takes about one more."""
LOAD_S = 0.001
OUTCOMES_S = 0.05
"""A frontend gathers outcomes so long."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(Ticket):
    request: Request
    on_decision: Callable[[Decision], None]
    on_refusal: Callable[[], None]


class VirtualRouter:
    """One router, all of whose state is its own classes'."""

    def __init__(
        self,
        settings: RouterSettings,
        workers: Collection[SimWorker],
        profile: Profile,
        block_size: int,
        timeline: Timeline,
        seed: int,
    ) -> None:
        self._timeline = timeline
        self._index = KvIndex(settings.index_max_blocks)
        self._holders: dict[str, Holder] = {}
        for worker in workers:
            self._holders[worker.instance_id] = self._index.open(worker.instance_id)
        roster = Roster()
        roster.update(_instance(worker, profile, block_size) for worker in workers)
        self._scheduler = Scheduler(
            POLICIES[settings.policy](settings.parameters),
            settings.remote_prefill_min_tokens,
            roster=roster,
            index=self._index,
            book=Book(settings.placement_ttl_s),
            predictions=Predictions(settings.approximate_ttl_s),
            chance=random.Random(seed),
            worker_backlog=settings.worker_backlog,
        )
        self._may_wait = settings.queue_max_requests > 0
        self._max_wait_s = settings.queue_max_wait_s
        self._room: WaitingRoom[_Waiting] = WaitingRoom(settings.queue_max_requests, settings.queue_max_tokens)
        self._news: list[tuple[int, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        """When it comes, its number, whether it may mean room for one that waits, and what to do with it."""
        self._told = 0
        self._look_at_ps = 0
        """When news is next looked at for those who wait; one in the past: not planned."""

    def place(
        self,
        request_id: str,
        hashes: Sequence[int],
        prompt_tokens: int,
        on_decision: Callable[[Decision], None],
        on_refusal: Callable[[], None],
    ) -> None:
        """Places one request, at once or when there is room, knowing what can be known by then."""
        self._read()
        now = self._timeline.now_s
        request = Request(request_id, MODEL, hashes, prompt_tokens)
        patience_s = self._max_wait_s
        if each_s := self._room.seconds_each(now):
            patience_s -= each_s * self._scheduler.backlog(request)
            if patience_s <= 0:
                on_refusal()
                return
        if not len(self._room):
            try:
                decision = self._scheduler.schedule(request, now, may_wait=self._may_wait)
            except NoRoom:
                pass
            else:
                on_decision(decision)
                return
        tokens = self._scheduler.uncached_tokens(request, now)
        waiting = _Waiting(
            priority=0,
            tenant="",
            tokens=tokens,
            deadline=now + patience_s,
            request=request,
            on_decision=on_decision,
            on_refusal=on_refusal,
        )
        try:
            displaced = self._room.enter(waiting, now)
        except (Overloaded, DeadlineExceeded):
            on_refusal()
            return
        self._timeline.after(patience_s, self._give_up, waiting)
        for one in displaced:
            one.on_refusal()
        self._plan_look()

    def events(self, instance_id: str, events: list[KvEvent]) -> None:
        """A worker says what it stored and removed."""
        self._tell(EVENTS_S, self._apply, instance_id, events, makes_room=False)

    def load(self, instance_id: str, load: LoadSnapshot) -> None:
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
        self._tell(LOAD_S, self._scheduler.report, report, self._timeline.now_s + LOAD_S)

    def prefilled(self, request_id: str, elapsed_s: float) -> None:
        """A frontend says that the prefill worker is done, so long after it was asked."""
        self._tell(OUTCOMES_S, self._scheduler.prefilled, request_id, self._timeline.now_s + OUTCOMES_S, elapsed_s)

    def first_token(self, request_id: str, ttft_s: float) -> None:
        """A frontend says that the answer began, so long after the request came."""
        self._tell(OUTCOMES_S, self._scheduler.first_token, request_id, self._timeline.now_s + OUTCOMES_S, ttft_s)

    def freed(self, request_id: str) -> None:
        """A frontend says that the answer ended."""
        self._tell(OUTCOMES_S, self._scheduler.freed, request_id)

    def _tell(self, delay_s: float, take: Callable[..., None], *arguments: Any, makes_room: bool = True) -> None:
        self._told += 1
        due_ps = self._timeline.now_ps + round(delay_s * PS)
        heapq.heappush(self._news, (due_ps, self._told, makes_room, take, arguments))
        if len(self._room):
            self._plan_look()

    def _read(self) -> bool:
        """Takes in what has come by now; whether any of it may have made room."""
        news, now_ps = self._news, self._timeline.now_ps
        may_have_made_room = False
        while news and news[0][0] <= now_ps:
            _, _, makes_room, take, arguments = heapq.heappop(news)
            take(*arguments)
            may_have_made_room = may_have_made_room or makes_room
        return may_have_made_room

    def _apply(self, instance_id: str, events: list[KvEvent]) -> None:
        holder = self._holders[instance_id]
        for event in events:
            self._index.apply(holder, event)

    def _plan_look(self) -> None:
        """Somebody waits: the next news is looked at when it comes."""
        if self._news:
            due_ps = max(self._news[0][0], self._timeline.now_ps)
            if not self._timeline.now_ps < self._look_at_ps <= due_ps:
                self._look_at_ps = due_ps
                self._timeline.at(due_ps, self._look, None)

    def _give_up(self, waiting: _Waiting) -> None:
        """It has waited as long as one may."""
        if waiting in self._room:
            self._room.leave(waiting, self._timeline.now_s)
            waiting.on_refusal()

    def _look(self, _: None) -> None:
        if self._read():
            now = self._timeline.now_s
            while (waiting := self._room.next()) is not None:
                try:
                    decision = self._scheduler.schedule(waiting.request, now, may_wait=True)
                except NoRoom:
                    break
                self._room.take(waiting, now)
                waiting.on_decision(decision)
        if len(self._room):
            self._plan_look()


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
