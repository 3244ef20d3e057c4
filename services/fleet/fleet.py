"""A fleet's process: many workers, one event loop, one etcd session and lease, one connection to NATS.

Routers, etcd and NATS see as many instances as there are workers, each with its own record, address, KV events and load
reports. What a worker of its own has beyond that is left out: a metrics port, a Control service, transfers of KV. The
process is an instance, too: `tokenmill drain` drains all of it.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import grpc
import msgspec

from controlplane.host import Host
from controlplane.instances import ModelCard, State
from controlplane.telemetry import get_logger
from engines.base import EngineRequest, Role, SamplingParams, StepOutput
from engines.host.decode_service import DecodeService
from engines.host.live import DecodeLimits
from engines.host.worker import Worker
from engines.settings import EngineSettings
from services.fleet.lodger import Lodger
from services.fleet.settings import FleetSettings

__all__ = ["Fleet"]

_STALL_TIMEOUT_S = 60.0
_AT_ONCE = 16
"""Workers that start at a time."""
_FAMILIES, _COMMON_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 64, 512, 256, 16
"""Made-up prompts: so many beginnings in the whole fleet, each followed by something of its own."""
_TOKENS = 256
"""Token ids they are made of: every vocabulary has those."""


class Fleet:
    """One process of a fleet, as a `controlplane.host.Service`."""

    name = "fleet"

    def __init__(self, settings: FleetSettings, engine: EngineSettings) -> None:
        """Raises `SettingsError`."""
        self._settings = settings
        self._workers = [
            Worker(
                Role.DECODE, engine, DecodeService(DecodeLimits()), stall_timeout_s=_STALL_TIMEOUT_S, canary_idle_s=0.0
            )
            for _ in range(settings.workers)
        ]
        self._lodgers: list[Lodger] = []
        self._failure: str | None = None
        self._log = get_logger(__name__)

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Its workers have servers of their own."""
        return []

    async def start(self, host: Host) -> ModelCard | None:
        """Returns when all its workers are READY."""
        own = host.instance
        for number, worker in enumerate(self._workers):
            instance_id = f"{own.instance_id}-{number:03}"
            instance = msgspec.structs.replace(
                own,
                service=worker.name,
                role=worker.name,
                instance_id=instance_id,
                state=State.STARTING,
                progress="",
            )
            settings = replace(host.settings, instance_id=instance_id)
            self._lodgers.append(
                Lodger(worker, settings, instance, host.discovery, host.bus, host.channels, self._on_failure)
            )
        slots = asyncio.Semaphore(_AT_ONCE)

        async def start(lodger: Lodger) -> None:
            async with slots:
                await lodger.start()

        async with asyncio.TaskGroup() as starts:
            for lodger in self._lodgers:
                starts.create_task(start(lodger))
        self._log.info("all workers are ready", workers=len(self._lodgers))
        if self._settings.prompts_per_s:
            for lodger in self._lodgers:
                host.spawn(self._make_prompts(lodger), "made-up prompts")
        return None

    async def drain(self, timeout_s: float) -> None:
        """All of them at once."""
        await asyncio.gather(*(lodger.drain(timeout_s) for lodger in self._lodgers))

    async def resume(self) -> None:
        """All of them at once."""
        await asyncio.gather(*(lodger.resume() for lodger in self._lodgers))

    def unfinished(self) -> int:
        """Answers of all of them."""
        return sum(worker.unfinished() for worker in self._workers)

    async def stop(self) -> None:
        """All of them at once."""
        await asyncio.gather(*(lodger.stop() for lodger in self._lodgers))

    def failed(self) -> str | None:
        """The first of them that can no longer serve."""
        return self._failure or next(filter(None, (worker.failed() for worker in self._workers)), None)

    def _on_failure(self, reason: str) -> None:
        self._failure = self._failure or reason

    async def _make_prompts(self, lodger: Lodger) -> None:
        """Keeps one worker's engine at work by itself, at a steady mean rate."""
        instance_id = lodger.instance.instance_id
        chance = random.Random(instance_id)
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, ignore_eos=True)
        number = 0
        while True:
            await asyncio.sleep(chance.expovariate(self._settings.prompts_per_s))
            number += 1
            prompt = _prompt(chance)
            await lodger.engine.generate(EngineRequest(f"{instance_id}-{number}", prompt, sampling), _unread)


def _prompt(chance: random.Random) -> array[int]:
    family = random.Random(chance.randrange(_FAMILIES))
    return array("I", [family.randrange(_TOKENS) for _ in range(_COMMON_TOKENS)]) + array(
        "I", [chance.randrange(_TOKENS) for _ in range(_OWN_TOKENS)]
    )


def _unread(outputs: Sequence[StepOutput]) -> None:
    """Nobody asked for them."""
