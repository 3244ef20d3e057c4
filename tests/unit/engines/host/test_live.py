"""Any order of submits, steps, ends, cancels and reads: a request ends exactly once, with a prefix of its tokens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from engines.base import EngineRequest, FinishReason, Handle, SamplingParams
from engines.host.live import DecodeLimits, LiveRequests
from engines.host.started import StartedEngine
from tests.scripted_engine import INFO, ScriptedEngine

SLOTS = 4
actions = st.tuples(
    st.sampled_from(["submit", "step", "finish", "cancel", "read", "turn"]),
    st.integers(0, SLOTS - 1),
    st.integers(1, 40),
)


@dataclass
class Deployment:
    """A worker's live requests, the engine behind and the frontend in front of them."""

    max_unsent_bytes: int
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    released: list[Handle] = field(default_factory=list)
    made: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    got: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, list[FinishReason]] = field(default_factory=lambda: defaultdict(list))
    submitted: list[str] = field(default_factory=list)
    in_slot: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        worker = StartedEngine(self.engine, INFO, "decode-1", 1, "", self.registry, self.released.append)
        self.live = LiveRequests(worker, DecodeLimits(max_unsent_bytes=self.max_unsent_bytes))
        self.stream = self.live.attach("frontend", 0.02)

    async def do(self, action: str, slot: int, count: int) -> None:
        request_id = self.in_slot.get(slot, "")
        match action:
            case "submit" if not request_id:
                request_id = self.in_slot[slot] = f"r{len(self.submitted)}"
                self.submitted.append(request_id)
                request = EngineRequest(request_id, [1, 2, 3], SamplingParams())
                await self.live.submit(request, self.stream, slot, timeout_s=0, handle_age_s=0)
            case "step" if request_id in self.engine.requests:
                start = len(self.made[request_id])
                tokens = list(range(start, start + count))
                self.made[request_id] += tokens
                self.engine.step({request_id: tokens})
            case "finish" if request_id in self.engine.requests:
                self.engine.finish(request_id)
            case "cancel":
                self.live.cancel([request_id])
            case "read":
                self.read()
            case "turn":
                await asyncio.sleep(0)

    def read(self) -> None:
        batch = self.stream.outbox.take()
        start = 0
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            self.got[self.in_slot[slot]] += batch.token_ids[start : start + count]
            start += count
        for finished in batch.finished:
            self.ends[self.in_slot.pop(finished.slot)].append(FinishReason(finished.reason))


@given(st.lists(actions, max_size=80), st.sampled_from([400, 1 << 20]))
@settings(deadline=None)
def test_every_request_ends_once_with_a_prefix_of_its_tokens(
    script: list[tuple[str, int, int]], max_unsent_bytes: int
) -> None:
    async def run() -> None:
        deployment = Deployment(max_unsent_bytes)
        for action in script:
            await deployment.do(*action)
        async with asyncio.timeout(5):
            for request_id in list(deployment.engine.requests):
                if request_id in deployment.engine.requests:
                    deployment.engine.finish(request_id)
                    await asyncio.sleep(0)
            await deployment.live.drain(1)
        while deployment.stream.outbox:
            deployment.read()

        assert {request_id: len(ends) for request_id, ends in deployment.ends.items()} == dict.fromkeys(
            deployment.submitted, 1
        )
        for request_id, (end,) in deployment.ends.items():
            made, got = deployment.made[request_id], deployment.got[request_id]
            assert got == made[: len(got)]
            assert end is not FinishReason.STOP or got == made, "an answer that ended well is whole"
            assert end is not FinishReason.ERROR or max_unsent_bytes == 400
        assert not deployment.engine.requests
        handoffs = deployment.registry.get_sample_value("tokenmill_kv_handoffs_total", {"outcome": "none"})
        assert (handoffs or 0) == len(deployment.submitted)

    asyncio.run(run())
