"""Replays a trace through the router and a cluster of sim engines. Pure: the same arguments give the same result.

arrival     the router places it at once
dispatch    half a millisecond later its worker has it
remote      the prefill worker holds the KV; decode has the request a round trip later and reads
transfer    one at a time in and out of a worker, at the profile's bandwidth
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.errors import SettingsError
from engines.base import FinishReason, KvOutcome
from engines.sim.profile import Profile
from engines.sim.scheduler import Coast
from kvcache.events import KvEvent
from services.router.scheduler import Decision
from services.router.settings import RouterSettings
from simulator.clock import PS, Timeline
from simulator.measures import Distribution, Gaps, Result, Timing
from simulator.router import VirtualRouter
from simulator.sequence import TraceSequence
from simulator.trace import TRACE_BLOCK, Arrival, block_hashes
from simulator.worker import SimWorker

__all__ = ["PATIENT", "Cluster", "Limits", "replay"]

HOP_S = 0.0005
"""One way between a frontend and a worker."""
LOAD_REPORT_S = 1.0
PATIENT: dict[str, Any] = {"queue_max_requests": 1_000_000, "queue_max_tokens": 10**12, "queue_max_wait_s": 1e6}
"""Settings of a router that refuses nobody: policies can only be compared by the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated."""

    profile: Profile
    decode: int
    prefill: int = 0
    """0: decode workers compute the prompts, too."""
    block_size: int = 512

    def __post_init__(self) -> None:
        if self.decode < 1 or self.prefill < 0:
            raise SettingsError(f"{self.decode} decode and {self.prefill} prefill workers: one must decode")
        if self.block_size < 1 or TRACE_BLOCK % self.block_size:
            raise SettingsError(
                f"block size {self.block_size} does not divide the traces' {TRACE_BLOCK}", param="block_size"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as goodput."""

    ttft_ms: float = 5_000.0
    itl_ms: float = 100.0
    """Its mean."""


def replay(
    arrivals: Sequence[Arrival],
    cluster: Cluster,
    settings: RouterSettings,
    *,
    seed: int = 0,
    limits: Limits | None = None,
    on_progress: Callable[[int], None] | None = None,
    collapse: bool = True,
) -> Result:
    """Runs all arrivals to their ends. `on_progress` is told how many have ended. Raises `SettingsError`."""
    longest = max(arrivals, key=lambda one: one.prompt_tokens + one.output_tokens)
    need, room = longest.prompt_tokens + longest.output_tokens, cluster.profile.kv_tokens
    if need > room // cluster.block_size * cluster.block_size:
        raise SettingsError(
            f"request {longest.number} of the trace has {need} tokens, a worker of this profile room for {room}",
            param="profile",
        )
    run = _Replay(arrivals, cluster, settings, seed, on_progress, collapse)
    run.timeline.run()
    return run.result(limits or Limits())


class _Replay:
    """One run; its workers' `Observer`."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        cluster: Cluster,
        settings: RouterSettings,
        seed: int,
        on_progress: Callable[[int], None] | None,
        collapse: bool,
    ) -> None:
        self.timeline = Timeline()
        self._arrivals = arrivals
        self._cluster = cluster
        self._policy = settings.policy
        self._on_progress = on_progress
        roles = ["prefill"] * cluster.prefill + ["decode"] * cluster.decode
        self._workers = {
            worker.instance_id: worker
            for worker in (
                SimWorker(
                    f"{role}-{number:03}",
                    number,
                    role,
                    cluster.profile,
                    cluster.block_size,
                    self.timeline,
                    self,
                    collapse=collapse,
                )
                for number, role in enumerate(roles)
            )
        }
        self._router = VirtualRouter(
            settings, list(self._workers.values()), cluster.profile, cluster.block_size, self.timeline, seed
        )
        self._timings: dict[int, Timing] = {}
        self._held_by: dict[int, SimWorker] = {}
        """Prefill workers, by request."""
        self._decoders: dict[int, tuple[SimWorker, Arrival]] = {}
        """Decode workers of requests that are prefilled elsewhere."""
        self._asked_at: dict[int, float] = {}
        """When their prefill workers were asked."""
        self._gaps = Gaps()
        self._ended = self._refused = self._remote_prefills = 0
        self._cached_tokens = 0
        """Of prompts, where they were computed: the tail that a decode worker computes again is no miss."""
        self._next = 0
        self._await_next()
        # Workers start at different moments, so they do not report all at once.
        chance = random.Random(seed)
        for worker in self._workers.values():
            self.timeline.after(chance.uniform(0, LOAD_REPORT_S), self._report_load, worker)

    # What happens

    def _await_next(self) -> None:
        if self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            self._next += 1
            self.timeline.at(round(arrival.at_s * PS), self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._await_next()
        self._timings[arrival.number] = Timing(self.timeline.now_s, arrival.output_tokens)
        hashes = block_hashes(arrival, self._cluster.block_size)

        def dispatch(decision: Decision) -> None:
            self._dispatch(arrival, hashes, decision)

        def refused() -> None:
            del self._timings[arrival.number]
            self._refused += 1
            self._one_ended()

        self._router.place(str(arrival.number), hashes, arrival.prompt_tokens, dispatch, refused)

    def _dispatch(self, arrival: Arrival, hashes: list[int], decision: Decision) -> None:
        decoder = self._workers[decision.decode.worker.instance_id]
        sequence = TraceSequence(
            arrival.number,
            arrival.prompt_tokens,
            arrival.output_tokens,
            hashes,
            prefill_only=decision.prefill is not None,
        )
        worker = decoder
        if decision.prefill is not None:
            self._remote_prefills += 1
            self._decoders[arrival.number] = decoder, arrival
            self._asked_at[arrival.number] = self.timeline.now_s
            worker = self._workers[decision.prefill.worker.instance_id]
        self.timeline.after(HOP_S, worker.add, sequence)

    def _report_load(self, worker: SimWorker) -> None:
        self._router.load(worker.instance_id, worker.load())
        if self._ended < len(self._arrivals):
            self.timeline.after(LOAD_REPORT_S, self._report_load, worker)

    def _transferred(self, reader: tuple[SimWorker, TraceSequence]) -> None:
        worker, sequence = reader
        holder = self._held_by.pop(sequence.number)
        in_time = holder.release(sequence)
        worker.receive(sequence, KvOutcome.READ if in_time else KvOutcome.TOO_OLD)

    # What workers do (Observer)

    def emitted(self, worker: SimWorker, sequence: TraceSequence, finish: FinishReason | None) -> None:
        """See `Observer`."""
        now = self.timeline.now_s
        timing = self._timings[sequence.number]
        if sequence.length == sequence.prompt_tokens + 1:
            timing.first_token = now
            self._router.first_token(sequence.request_id, timing.ttft)
            self._count(worker, sequence, cached=not sequence.remote)
        if finish is not None:
            timing.ended = now
            self._router.freed(sequence.request_id)
            self._one_ended()

    def decoded(self, tokens: int, gap_ps: int) -> None:
        """See `Observer`."""
        self._gaps.add(tokens, gap_ps)

    def coasted(self, coast: Coast, steps: int) -> None:
        """See `Observer`."""
        self._gaps.add_coast(coast, steps)

    def prefilled(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """See `Observer`."""
        self._count(worker, sequence, cached=True)
        decoder, arrival = self._decoders.pop(sequence.number)
        self._held_by[sequence.number] = worker
        elapsed_s = self.timeline.now_s - self._asked_at.pop(sequence.number)
        self._router.prefilled(sequence.request_id, elapsed_s)
        blocks = arrival.prompt_tokens // self._cluster.block_size
        continued = TraceSequence(
            arrival.number,
            arrival.prompt_tokens,
            arrival.output_tokens,
            sequence.hashes[:blocks],
            handle_blocks=decoder.readable_blocks(arrival.prompt_tokens),
            remote=True,
        )
        self.timeline.after(2 * HOP_S, decoder.add, continued)

    def wants_kv(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """See `Observer`."""
        holder = self._held_by[sequence.number]
        tokens = sequence.handle_blocks * self._cluster.block_size - sequence.computed
        began = max(self.timeline.now_ps, holder.link_free_ps, worker.link_free_ps)
        ends = began + round(self._cluster.profile.transfer_s(tokens) * PS)
        holder.link_free_ps = worker.link_free_ps = ends
        self.timeline.at(ends, self._transferred, (worker, sequence))

    def spares_kv(self, worker: SimWorker, sequence: TraceSequence) -> None:
        """See `Observer`."""
        self.timeline.after(HOP_S, self._held_by.pop(sequence.number).release, sequence)

    def events(self, worker: SimWorker, events: list[KvEvent]) -> None:
        """See `Observer`."""
        self._router.events(worker.instance_id, events)

    # The result

    def _one_ended(self) -> None:
        self._ended += 1
        if self._on_progress is not None:
            self._on_progress(self._ended)

    def _count(self, worker: SimWorker, sequence: TraceSequence, *, cached: bool) -> None:
        held = sequence.cached_tokens or 0
        worker.computed_tokens += sequence.prompt_tokens - held - sequence.remote_tokens
        if cached:
            self._cached_tokens += held

    def result(self, limits: Limits) -> Result:
        """After the last event."""
        timings = list(self._timings.values())
        if self._ended != len(self._arrivals):
            raise AssertionError(f"{self._ended} of {len(self._arrivals)} requests ended")
        if not timings:
            raise SettingsError("every request was refused: there is nothing to measure", param="workers")
        prompt_tokens = sum(one.prompt_tokens for one in self._arrivals if one.number in self._timings)
        computers = [one for one in self._workers.values() if one.role == "prefill"] or list(self._workers.values())
        computed = {one.instance_id: one.computed_tokens for one in computers}
        good = sum(1000 * one.ttft <= limits.ttft_ms and 1000 * one.tpot <= limits.itl_ms for one in timings)
        span = max(one.ended for one in timings) - min(one.arrived for one in timings)
        return Result(
            policy=self._policy,
            ttft=Distribution.of([one.ttft for one in timings]),
            itl=self._gaps.distribution(),
            e2e=Distribution.of([one.ended - one.arrived for one in timings]),
            hit_rate=self._cached_tokens / prompt_tokens,
            load_max_over_mean=max(computed.values()) * len(computed) / max(1, sum(computed.values())),
            goodput=good / span,
            good_share=good / len(self._arrivals),
            requests=len(self._arrivals),
            refused=self._refused,
            virtual_s=span,
            computed_tokens=computed,
            remote_prefills=self._remote_prefills,
        )
