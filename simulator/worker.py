"""A simulated worker under the virtual clock: the sim engine's scheduler, and time that passes step by step. Pure.

Steps that only decode are taken in one go, as far as the scheduler can promise them (`Coast`). Who looks in before they
are over sees exactly what stepping would show: the steps that have begun by then are done first.
"""

from __future__ import annotations

from typing import Protocol

from engines.base import FinishReason, KvOutcome, LoadSnapshot
from engines.sim.profile import Profile
from engines.sim.scheduler import Coast, Scheduler, Step
from engines.sim.sequence import Sequence as EngineSequence
from kvcache.events import KvEvent
from simulator.clock import PS, Timeline
from simulator.sequence import TraceSequence

__all__ = ["LEASE_S", "Observer", "SimWorker"]

LEASE_S = 120.0
"""How long a prefill worker holds a prompt's KV."""


class Observer(Protocol):
    """Who is told what a worker does, when it is done."""

    def emitted(self, worker: SimWorker, sequence: TraceSequence, finish: FinishReason | None) -> None:
        """A first token, or a last one, or both."""

    def decoded(self, tokens: int, gap_ps: int) -> None:
        """So many tokens came that long after the ones before them."""

    def coasted(self, coast: Coast, steps: int) -> None:
        """The same, for many steps."""

    def prefilled(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """A prompt is computed, its KV held."""

    def wants_kv(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """It waits for KV that another worker holds; answer with `receive`."""

    def spares_kv(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """It needs none of what another worker holds for it."""

    def events(self, worker: SimWorker, events: list[KvEvent]) -> None:
        """KV events, in order."""


class SimWorker:
    """One engine, `number` among all of them. `collapse=False` takes every step singly, for comparison."""

    def __init__(
        self,
        instance_id: str,
        number: int,
        role: str,
        profile: Profile,
        block_size: int,
        timeline: Timeline,
        observer: Observer,
        *,
        collapse: bool = True,
    ) -> None:
        self.instance_id = instance_id
        self._number = number
        self.role = role
        self.total_blocks = profile.kv_tokens // block_size
        self.computed_tokens = 0
        """Prompt tokens computed here."""
        self.link_free_ps = 0
        """When its last transfer ends."""
        self._timeline = timeline
        self._observer = observer
        self._collapse = collapse
        self._scheduler = Scheduler(
            self.total_blocks, block_size, profile.max_num_seqs, profile.max_batched_tokens, profile
        )
        self._stepping = False
        self._coast: Coast | None = None
        self._coast_began_ps = 0
        self._coasted = 0
        """Steps of it that are done."""
        self._coast_number = 0
        """Of the run of steps whose end is awaited; another one's end is void."""

    # From outside

    def add(self, sequence: TraceSequence) -> None:
        """A request comes."""
        self._interrupt()
        self._scheduler.add(sequence)
        self._wake()

    def receive(self, sequence: TraceSequence, outcome: KvOutcome) -> None:
        """The transfer it waited for has ended."""
        self._interrupt()
        self._scheduler.finish_read(sequence, outcome)
        self._wake()

    def release(self, sequence: TraceSequence) -> bool:
        """Whoever was to read its KV needs it no more. False: it is gone already."""
        self._interrupt()
        released = self._scheduler.release(sequence.request_id)
        self._wake()
        return released

    def load(self) -> LoadSnapshot:
        """How busy it is now."""
        self._catch_up()
        return self._scheduler.load()

    def readable_blocks(self, prompt_tokens: int) -> int:
        """See `Scheduler.readable_blocks`."""
        return self._scheduler.readable_blocks(prompt_tokens)

    # Steps

    def _wake(self) -> None:
        if not self._stepping:
            self._begin()

    def _begin(self) -> None:
        timeline = self._timeline
        if self._collapse and (coast := self._scheduler.coast()) is not None and coast.steps > 1:
            self._stepping = True
            self._coast, self._coast_began_ps, self._coasted = coast, timeline.now_ps, 0
            self._await_end_of_coast(coast)
            return
        step = self._scheduler.step(timeline.now_s)
        for sequence in step.unneeded:
            self._observer.spares_kv(self, _ours(sequence))
        for sequence in step.reads:
            self._observer.wants_kv(self, _ours(sequence))
        self._stepping = step.duration_ps > 0
        if self._stepping:
            timeline.at(timeline.now_ps + step.duration_ps, self._end, step, order=self._number)
        elif (expiry := self._scheduler.next_expiry()) is not None:
            timeline.at(max(timeline.now_ps + 1, round(expiry * PS)), self._expire, None)

    def _expire(self, _: None) -> None:
        self._wake()

    def _end(self, step: Step) -> None:
        now = self._timeline.now_ps
        in_time = now - step.duration_ps
        observer = self._observer
        in_a_row = 0
        for one, finish in step.emitted:
            sequence = _ours(one)
            generated = sequence.length - sequence.prompt_tokens
            if generated > 1:
                if sequence.last_at_ps == in_time:
                    in_a_row += 1
                else:
                    observer.decoded(1, now - sequence.last_at_ps)
            sequence.last_at_ps = now
            if generated == 1 or finish is not None:
                observer.emitted(self, sequence, finish)
        if in_a_row:
            observer.decoded(in_a_row, step.duration_ps)
        for one in step.prefilled:
            sequence = _ours(one)
            self._scheduler.hold(sequence, sequence.request_id, self._timeline.now_s + LEASE_S)
            observer.prefilled(self, sequence)
        self._tell_events()
        self._begin()

    def _tell_events(self) -> None:
        if events := self._scheduler.drain_events():
            self._observer.events(self, events)

    # Many steps at once

    def _await_end_of_coast(self, coast: Coast) -> None:
        self._coast_number += 1
        self._timeline.at(
            self._coast_began_ps + coast.duration_ps(coast.steps),
            self._end_coast,
            self._coast_number,
            order=self._number,
        )

    def _catch_up(self) -> None:
        """Does the steps that have begun by now."""
        coast = self._coast
        if coast is not None:
            begun = coast.begun(self._timeline.now_ps - self._coast_began_ps)
            if begun > self._coasted:
                self._scheduler.advance(coast.after(self._coasted), begun - self._coasted)
                self._coasted = begun

    def _interrupt(self) -> None:
        """Something comes that the steps which have not begun must know of."""
        self._catch_up()
        coast = self._coast
        if coast is not None and self._coasted < coast.steps:
            self._coast = coast.first(self._coasted)
            self._await_end_of_coast(self._coast)

    def _end_coast(self, number: int) -> None:
        coast = self._coast
        if coast is None or number != self._coast_number:
            return
        self._catch_up()
        self._coast = None
        in_time, now = self._coast_began_ps, self._timeline.now_ps
        late = 0
        for one in self._scheduler.running:
            sequence = _ours(one)
            if sequence.last_at_ps != in_time:
                self._observer.decoded(1, in_time + coast.first_ps - sequence.last_at_ps)
                late += 1
            sequence.last_at_ps = now
        if late < coast.batch:
            self._observer.decoded(coast.batch - late, coast.first_ps)
        if coast.steps > 1:
            self._observer.coasted(coast.after(1), coast.steps - 1)
        self._tell_events()  # of what was read meanwhile: the steps themselves fill nothing
        self._begin()


def _ours(sequence: EngineSequence) -> TraceSequence:
    assert isinstance(sequence, TraceSequence)
    return sequence
