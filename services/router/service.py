"""The router as a gRPC service: protobuf at the edge, the decisions in `scheduler.py`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.errors import DeadlineExceeded, NotFound, Unavailable
from controlplane.host import Host
from controlplane.instances import Instance, ModelCard, State
from controlplane.telemetry import get_logger
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.candidates import Candidate
from services.router.decision import Decision
from services.router.decisions_log import DecisionsLog
from services.router.explain import all_candidates, explained
from services.router.history import History
from services.router.ingest import Ingest
from services.router.placements import Book
from services.router.policies import POLICIES
from services.router.predictions import Predictions
from services.router.queues import Queues
from services.router.replica_bus import ReplicaBus
from services.router.replicas import Event, Replicas
from services.router.scheduler import Request, Scheduler
from services.router.sessions import Sessions
from services.router.settings import RouterSettings
from services.router.workers import Roster
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["RouterService"]

WARM_UP_S = 2.0
"""A router that starts into a running deployment is READY once it knows what the workers hold and do, or after this
long."""
EXPLAIN_KEY = "tokenmill-explain"
QUIET_S = 0.5
"""A draining router goes once nobody has asked it for so long: all frontends have turned to another one."""
CONFIRM_S = 10.0
KV_EVENTS = "kv_events"
"""`engines.base.Capability.KV_EVENTS`; the router imports no engine."""


class RouterService(router_pb2_grpc.RouterServicer):
    """Owns the router's state; everything in it happens on the event loop's thread."""

    name = "router"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._log = get_logger(__name__)
        self._index = KvIndex(settings.index_max_blocks)
        self._roster = Roster()
        self._book = Book(settings.placement_ttl_s)
        self._predictions = Predictions(settings.approximate_ttl_s)
        self._sessions = Sessions(settings.session_ttl_s)
        self._decisions_log: DecisionsLog | None = None
        self._history = History(settings.explain_ring, self._log_decision)
        self._scheduler = Scheduler(
            POLICIES[settings.policy](settings.parameters),
            settings.remote_prefill_min_tokens,
            roster=self._roster,
            index=self._index,
            book=self._book,
            predictions=self._predictions,
            chance=random.Random(),
            sessions=self._sessions,
            worker_backlog=settings.worker_backlog,
            history=self._history,
        )
        self._queues: Queues | None = None
        self._replicas: ReplicaBus | None = None
        self._ingest: Ingest | None = None
        self._metrics: _Metrics | None = None
        self._refused_pairs: set[tuple[str, str]] = set()
        self._instances: Mapping[str, Instance] = {}
        self._frontends: set[str] = set()
        self._instances_changed = asyncio.Event()
        """Replaced with each change."""
        self._unheard: set[str] | None = None
        """While it starts: workers whose load is not known yet."""
        self._all_heard = asyncio.Event()
        self._last_asked = 0.0

    # Life (controlplane.host.Service)

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the Router service."""
        router_pb2_grpc.add_RouterServicer_to_server(self, server)
        return [router_pb2.DESCRIPTOR.services_by_name["Router"].full_name]

    async def start(self, host: Host) -> ModelCard | None:
        """Follows the workers and the other routers; ready when the first picture is complete."""
        settings, own = self._settings, host.instance
        self._metrics = _Metrics(host.registry, settings.policy, self._book)
        if self._settings.decisions_log:
            path = Path(self._settings.decisions_log)
            self._decisions_log = DecisionsLog(path, self._settings.policy, host.registry)
        self._queues = Queues(
            self._scheduler,
            max_requests=settings.queue_max_requests,
            max_tokens=settings.queue_max_tokens,
            max_wait_s=settings.queue_max_wait_s,
            registry=host.registry,
        )
        self._ingest = Ingest(
            self._index,
            self,
            deployment=host.settings.deployment,
            discovery=host.discovery,
            bus=host.bus,
            channels=host.channels,
            registry=host.registry,
        )
        replicas = Replicas(own.instance_id, own.epoch, self._book, self._predictions, self._sessions)
        deployment, bus = host.settings.deployment, host.bus
        self._replicas = ReplicaBus(replicas, bus, deployment, own.instance_id, host.registry)
        await self._replicas.begin(self._wake)
        await self._ingest.begin()
        host.spawn(self._ingest.run(), "ingest")
        await self._warm_up(self._ingest)
        return None

    async def _warm_up(self, ingest: Ingest) -> None:
        workers = [one for one in self._instances.values() if one.role and one.state is State.READY]
        self._unheard = {one.instance_id for one in workers}
        if not workers:
            return
        try:
            async with asyncio.timeout(WARM_UP_S):
                if await ingest.wait_in_step(WARM_UP_S):
                    await self._all_heard.wait()
        except TimeoutError:
            pass
        if ingest.waiting or self._unheard:
            self._log.warning("ready without every worker's blocks and load; they follow", waited_s=WARM_UP_S)
        self._unheard = None

    async def drain(self, timeout_s: float) -> None:
        """Decides on until the frontends have turned to another router and nobody waits for a turn.

        If there is no other, to the end of the time.
        """
        end = time.monotonic() + timeout_s
        until = min(time.monotonic() + QUIET_S, end)
        while until > time.monotonic():
            await asyncio.sleep(until - time.monotonic())
            quiet_from = time.monotonic() if self.unfinished() else self._last_asked
            until = min(quiet_from + QUIET_S, end)

    async def resume(self) -> None:
        """It never stopped deciding."""

    def unfinished(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queues) if self._queues is not None else 0

    async def stop(self) -> None:
        """The host ends the ingest; other routers hear the last of what was placed."""
        if self._replicas is not None:
            self._replicas.close()
        self._history.close()
        if self._decisions_log is not None:
            await asyncio.to_thread(self._decisions_log.close)

    def failed(self) -> str | None:
        """It has no way to fail that its host does not see."""
        return None

    # Calls

    async def Schedule(  # noqa: N802
        self,
        request: router_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[router_pb2.ScheduleRequest, Awaitable[router_pb2.ScheduleResponse]],
    ) -> router_pb2.ScheduleResponse:
        """Places one request, at once or when it is its turn."""
        began = time.perf_counter()
        self._last_asked = time.monotonic()
        metrics, queues, replicas = self._metrics, self._queues, self._replicas
        if metrics is None or queues is None or replicas is None:
            raise Unavailable("the router is starting; try again", retry_after_s=1.0)
        decision, waited_s = await queues.place(_request(request), context.time_remaining)
        replicas.placed(decision)
        explain = any(key == EXPLAIN_KEY and value == "1" for key, value in context.invocation_metadata() or ())
        response = self._response(decision, waited_s, explain=explain)
        metrics.decided(decision, time.perf_counter() - began - waited_s)
        waiting = self._ingest.waiting if self._ingest is not None else ()
        if waiting and any(worker.instance_id in waiting for worker in decision.pool.workers):
            metrics.cold.inc()
        return response

    async def IsWaiting(  # noqa: N802
        self,
        request: router_pb2.IsWaitingRequest,
        context: grpc.aio.ServicerContext[router_pb2.IsWaitingRequest, Awaitable[router_pb2.IsWaitingResponse]],
    ) -> router_pb2.IsWaitingResponse:
        """Says whether a request has its place in the queue."""
        waiting = self._queues is not None and self._queues.holds(request.request_id)
        return router_pb2.IsWaitingResponse(waiting=waiting)

    async def Report(  # noqa: N802
        self,
        request: router_pb2.ReportRequest,
        context: grpc.aio.ServicerContext[router_pb2.ReportRequest, Awaitable[router_pb2.ReportResponse]],
    ) -> router_pb2.ReportResponse:
        """Takes what came of earlier placements."""
        now = time.monotonic()
        for outcome in request.outcomes:
            request_id = outcome.request_id
            match outcome.WhichOneof("outcome"):
                case "prefill_done":
                    event = Event.PREFILLED
                    done = outcome.prefill_done
                    self._scheduler.prefilled(request_id, now, done.elapsed_ms / 1000, done.cached_tokens)
                case "first_token":
                    event = Event.FIRST_TOKEN
                    self._scheduler.first_token(request_id, now, outcome.first_token.ttft_ms / 1000)
                case "freed":
                    event = Event.FREED
                    freed = outcome.freed
                    self._scheduler.freed(request_id, freed.cached_tokens, freed.completion_tokens)
                case _:
                    continue
            if self._replicas is not None:
                self._replicas.settled(request_id, event)
        self._wake()
        return router_pb2.ReportResponse()

    async def Explain(  # noqa: N802
        self,
        request: router_pb2.ExplainRequest,
        context: grpc.aio.ServicerContext[router_pb2.ExplainRequest, Awaitable[router_pb2.ExplainResponse]],
    ) -> router_pb2.ExplainResponse:
        """Tells all of one of the latest decisions."""
        decision = self._history.find(request.request_id)
        if decision is None:
            raise NotFound(
                f"{request.request_id!r} is not among this router's latest {len(self._history)} decisions",
                param="request_id",
            )
        return explained(decision, self._settings.policy, time.monotonic())

    async def GetIndex(  # noqa: N802
        self,
        request: router_pb2.GetIndexRequest,
        context: grpc.aio.ServicerContext[router_pb2.GetIndexRequest, AsyncIterator[router_pb2.WorkerBlocks]],
    ) -> AsyncIterator[router_pb2.WorkerBlocks]:
        """Shows the index. Scans all of it for each worker."""
        followers = self._ingest.followers if self._ingest is not None else []
        if request.instance_id:
            followers = [one for one in followers if one.instance_id == request.instance_id]
            if not followers:
                raise NotFound(f"no worker {request.instance_id!r} is followed", param="instance_id")
        for follower in followers:
            yield router_pb2.WorkerBlocks(
                instance_id=follower.instance_id,
                epoch=follower.epoch,
                seq=follower.seq,
                hashes=self._index.blocks(follower.holder),
                stale=follower.gap is not None,
                dp_rank=follower.dp_rank,
            )

    async def ConfirmDraining(  # noqa: N802
        self,
        request: router_pb2.ConfirmDrainingRequest,
        context: grpc.aio.ServicerContext[
            router_pb2.ConfirmDrainingRequest, Awaitable[router_pb2.ConfirmDrainingResponse]
        ],
    ) -> router_pb2.ConfirmDrainingResponse:
        """Answers once nothing is placed on that instance any more."""
        try:
            async with asyncio.timeout(CONFIRM_S):
                while self._is_chosen_from(request.instance_id, request.epoch):
                    await self._instances_changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{request.instance_id} is not known to drain after {CONFIRM_S:g} s") from None
        return router_pb2.ConfirmDrainingResponse()

    def _is_chosen_from(self, instance_id: str, epoch: int) -> bool:
        known = self._instances.get(instance_id)
        return known is not None and known.epoch == epoch and known.state in (State.READY, State.SUSPECT)

    # News of workers (services.router.ingest.Listener)

    def on_instances(self, instances: Mapping[str, Instance]) -> None:
        """Takes the workers to choose from, and says loudly which of them cannot work together."""
        self._roster.update(instances.values())
        self._predictions.set_silent(
            {
                one.instance_id: one.model.total_blocks
                for one in instances.values()
                if one.role and one.model is not None and KV_EVENTS not in one.model.capabilities
            }
        )
        self._instances = instances
        self._free_for({name for name, one in instances.items() if one.service == "frontend"})
        if self._replicas is not None:
            self._replicas.keep(
                {name for name, one in instances.items() if one.service == self.name and one.state is not State.FAILED}
            )
        self._instances_changed.set()
        self._instances_changed = asyncio.Event()
        pairs = {
            (prefill.instance_id, decode.instance_id): prefill.format.differences(decode.format)
            for prefill, decode in self._roster.incompatible_pairs()
        }
        for (prefill_id, decode_id), differences in pairs.items():
            if (prefill_id, decode_id) not in self._refused_pairs:
                self._log.error(
                    "these two cannot exchange KV and are never paired",
                    prefill=prefill_id,
                    decode=decode_id,
                    differences=differences,
                )
        self._refused_pairs = set(pairs)
        if self._metrics is not None:
            self._metrics.incompatible_pairs.set(len(pairs))
        self._wake()

    def _free_for(self, frontends: set[str]) -> None:
        """Nobody will say what came of the requests of a frontend that is gone: its workers have cancelled them."""
        if gone := self._frontends - frontends:
            for request_id in self._book.asked_by(gone):
                self._scheduler.freed(request_id)
                if self._replicas is not None:
                    self._replicas.settled(request_id, Event.FREED)
        self._frontends = frontends

    def on_load(self, report: LoadReport) -> None:
        """Corrects what is believed of a worker's load."""
        self._scheduler.report(report, time.monotonic())
        if self._unheard is not None:
            self._unheard.discard(report.instance_id)
            if not self._unheard:
                self._all_heard.set()
        self._wake()

    def on_forget(self, instance_id: str) -> None:
        """Nothing that was placed there runs any more."""
        self._scheduler.forget(instance_id)

    def _wake(self) -> None:
        """A worker may have room now."""
        if self._queues is not None:
            self._queues.wake()

    def _log_decision(self, decision: Decision) -> None:
        if self._decisions_log is not None:
            self._decisions_log.add(decision)

    def _response(self, decision: Decision, waited_s: float, *, explain: bool) -> router_pb2.ScheduleResponse:
        response = router_pb2.ScheduleResponse(
            decode=_target(decision.decode),
            prefill=_target(decision.prefill) if decision.prefill is not None else None,
            uncached_tokens=decision.computes.uncached_tokens,
            policy=self._settings.policy,
            why=decision.why,
            predicted_ttft_ms=round(decision.predicted_ttft_s * 1000),
            queue_wait_ms=round(waited_s * 1000),
        )
        if explain:
            response.candidates.extend(all_candidates(decision))
        return response


class _Metrics:
    """Labels are resolved once: a decision is made thousands of times a second."""

    def __init__(self, registry: CollectorRegistry, policy: str, book: Book) -> None:
        decisions = Counter("tokenmill_router_decisions", "Requests placed", ["policy", "remote"], registry=registry)
        self._remote = decisions.labels(policy, "true")
        self._local = decisions.labels(policy, "false")
        self.cold = Counter(
            "tokenmill_router_cold_decisions",
            "Requests placed while the picture of a worker of their model waited for a snapshot",
            registry=registry,
        )
        self._seconds = Histogram(
            "tokenmill_router_schedule_seconds",
            "Time to place a request",
            buckets=(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1),
            registry=registry,
        )
        tokens = Counter("tokenmill_router_prompt_tokens", "Prompt tokens placed", ["kv"], registry=registry)
        self._held, self._uncached = tokens.labels("held"), tokens.labels("uncached")
        self.incompatible_pairs = Gauge(
            "tokenmill_router_incompatible_pairs", "Prefill-decode pairs whose KV formats differ", registry=registry
        )
        Gauge("tokenmill_router_placements", "Placements in flight", registry=registry).set_function(lambda: len(book))

    def decided(self, decision: Decision, seconds: float) -> None:
        """Counts one decision."""
        computes = decision.computes
        (self._remote if decision.prefill is not None else self._local).inc()
        self._held.inc(computes.held_blocks * computes.worker.format.block_size)
        self._uncached.inc(computes.uncached_tokens)
        self._seconds.observe(seconds)


def _request(request: router_pb2.ScheduleRequest) -> Request:
    return Request(
        request.request_id,
        request.model,
        request.block_hashes[:],  # a list: much cheaper to go through again and again
        request.prompt_tokens,
        excluded=request.excluded_instances[:],
        avoided=request.avoided_instances[:],
        max_tokens=request.max_tokens,
        priority=request.priority,
        tenant=request.tenant,
        lora=request.lora,
        labels=dict(request.labels),
        capabilities=request.capabilities[:],
        session_id=request.session_id,
        session_hard=request.session_hard,
        pinned=request.pinned_instance,
        timeout_s=request.timeout_ms / 1000,
        frontend_id=request.frontend_id,
        waited_s=request.waited_ms / 1000,
    )


def _target(candidate: Candidate) -> router_pb2.Target:
    worker = candidate.worker
    return router_pb2.Target(
        instance_id=worker.instance_id,
        epoch=worker.epoch,
        address=worker.address,
        overlap_blocks=candidate.held_blocks,
    )
