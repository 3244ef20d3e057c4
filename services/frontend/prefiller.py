"""Has a prefill worker compute an answer's prompt, and sees to it that no KV stays held for nobody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from controlplane.channels import Channels
from controlplane.errors import TokenmillError
from controlplane.telemetry import get_logger
from services.frontend.answer import Answer
from services.frontend.breaker import Breakers, Outcome, outcome_of
from services.frontend.calls import left_s, metadata
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics
from services.frontend.placer import Placement
from services.frontend.pulse import Pulses
from services.frontend.releases import Releases
from services.frontend.reports import Reports
from services.frontend.sampling import sampling_to_proto
from services.frontend.stage import Stage
from tokenmill.common.v1 import common_pb2
from tokenmill.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tokenmill.router.v1 import router_pb2

__all__ = ["HeldKv", "Prefiller"]


@dataclass(slots=True)
class HeldKv:
    """A handle nobody has read yet, and when it came."""

    handle: common_pb2.KvHandle
    received_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def aged(self) -> common_pb2.KvHandle:
        """With the lease that is left now."""
        passed_ms = round((asyncio.get_running_loop().time() - self.received_at) * 1000)
        self.handle.remaining_lease_ms = max(self.handle.remaining_lease_ms - passed_ms, 0)
        return self.handle


class Prefiller:
    """`run` owns the work that outlives a request."""

    def __init__(
        self, channels: Channels, breakers: Breakers, reports: Reports, metrics: FrontendMetrics, *, timeout_s: float
    ) -> None:
        self._channels = channels
        self._breakers = breakers
        self._reports = reports
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._pulses = Pulses(channels)
        self._releases = Releases(channels)
        self._log = get_logger(__name__)

    async def run(self) -> None:
        """Gives back KV that nobody will read, until cancelled."""
        await self._releases.run()

    async def prefill(self, answer: Answer, placement: Placement) -> HeldKv | None:
        """None: decode computes the prompt, as planned or because the prefill worker failed."""
        target = placement.prefill
        if target is None:
            return None
        answer.stage = Stage.PREFILLING
        loop = asyncio.get_running_loop()
        self._breakers.began(target.instance_id, target.epoch, loop.time())
        outcome = Outcome.NOTHING
        done: prefill_pb2.RunResponse | None = None
        try:
            done = await self._run(answer, target)
            outcome = Outcome.GOOD
        except TokenmillError as error:
            outcome = outcome_of(error)
            self._metrics.prefill_fallbacks.labels(error.code).inc()
            self._log.warning(
                "remote prefill failed; decode computes the prompt",
                request_id=answer.request_id,
                prefill=target.instance_id,
                reason=error.message,
            )
            answer.stage = Stage.PLACED
            return None
        finally:
            self._breakers.ended(target.instance_id, target.epoch, outcome, loop.time())
            if done is None:
                # Its answer may have been on its way when it was given up.
                release = prefill_pb2.ReleaseRequest(request_id=answer.request_id, epoch=target.epoch)
                self._releases.add(target.address, release, answer.generation.trace_id)
        prefilled = router_pb2.PrefillDone(cached_tokens=done.cached_tokens, elapsed_ms=done.elapsed_ms)
        self._reports.add(placement.router, router_pb2.Outcome(request_id=answer.request_id, prefill_done=prefilled))
        answer.stage = Stage.PREFILLED
        return HeldKv(done.handle)

    def give_back(self, kv: HeldKv, generation: Generation) -> None:
        """It may not have been read, and will not be any more. If it was, this does nothing."""
        release = prefill_pb2.ReleaseRequest(handle_id=kv.handle.handle_id, epoch=kv.handle.epoch)
        self._releases.add(kv.handle.address, release, generation.trace_id)

    async def _run(self, answer: Answer, target: router_pb2.Target) -> prefill_pb2.RunResponse:
        generation = answer.generation
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(target.address))
        request = prefill_pb2.RunRequest(
            request_id=answer.request_id,
            model=generation.model.name,
            prompt_token_ids=generation.prompt,
            sampling=sampling_to_proto(generation.sampling),
            priority=generation.routing.priority,
            epoch=target.epoch,
        )
        # A worker that is too slow leaves decode the time to compute the prompt itself.
        timeout_s = min(self._timeout_s, left_s(generation) / 2)
        call = stub.Run(request, timeout=timeout_s, metadata=metadata(generation))
        done: prefill_pb2.RunResponse = await self._pulses.unless_lost(target.address, call)
        return done
