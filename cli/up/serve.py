"""Waits until a plan's processes are up and a request has truly been answered, and keeps watching them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from prometheus_client import CollectorRegistry

from cli.openai_client import OpenAiClient
from cli.up.plan import Plan
from cli.up.progress import Progress
from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedServer
from controlplane.errors import TokenmillError, Unavailable
from controlplane.instances import Instance, ModelCard, State
from controlplane.supervisor import Supervisor

__all__ = ["RollCall", "first_answer", "servers_answer", "watched"]

_POLL_S = 0.05
_PATIENCE_S = 5.0
"""After so long without an etcd, say so."""
_ANSWER_TIMEOUT_S = 60.0
"""Everybody is ready by then: what still fails after this long will not mend itself."""
_REMOTE_TIMEOUT_S = 15.0
"""How long after that an answer may still miss the prefill workers, for the router hears of them by itself."""


async def servers_answer(servers: Sequence[EmbeddedServer], supervisor: Supervisor, progress: Progress) -> None:
    """Waits until the embedded servers serve."""
    for server in servers:
        await supervisor.until_ready(server.name)
        progress.ready(server.name)


class RollCall:
    """Which of a plan's services are ready, as discovery sees them; tells the supervisor and the progress."""

    def __init__(self, plan: Plan, discovery: Discovery, supervisor: Supervisor, progress: Progress) -> None:
        self._plan = plan
        self._discovery = discovery
        self._supervisor = supervisor
        self._progress = progress
        self._complete: asyncio.Future[tuple[Instance, ModelCard]] = asyncio.get_running_loop().create_future()

    async def complete(self) -> tuple[Instance, ModelCard]:
        """Waits until all were ready at the same time; the frontend and the model as they were then."""
        return await self._complete

    def missing(self) -> list[str]:
        """Names of those that are not ready."""
        return [name for instance_id, name in self._plan.services.items() if instance_id not in self._ready()]

    def look(self) -> None:
        """Passes on what is new. Of two instances of a child, people hear of the one that counts."""
        for found in self._present():
            name, pid = self._supervisor.pids()[found.instance_id]
            if found.state is State.READY:
                self._supervisor.mark_ready(name, pid)
            if pid != self._supervisor.pid(name):
                continue
            if found.state is State.READY:
                self._progress.ready(name)
            else:
                self._progress.update(name, found.progress or found.state.value)
        ready = self._ready()
        models = [found.model for found in ready.values() if found.model is not None]
        if models and not self.missing() and not self._complete.done():
            self._complete.set_result((ready[self._plan.frontend], models[0]))

    def _present(self) -> list[Instance]:
        """What the present processes have published of themselves."""
        known = self._discovery.instances
        # A record outlives its process until the lease ends; one of an earlier life says nothing of this one.
        return [
            known[instance_id]
            for instance_id, (_, pid) in self._supervisor.pids().items()
            if instance_id in known and known[instance_id].pid == pid
        ]

    def _ready(self) -> dict[str, Instance]:
        return {found.instance_id: found for found in self._present() if found.state is State.READY}


@asynccontextmanager
async def watched(plan: Plan, supervisor: Supervisor, progress: Progress) -> AsyncIterator[RollCall]:
    """Watches a plan's services through discovery."""
    try:
        discovery = await Discovery.connect(plan.etcd, plan.deployment, CollectorRegistry(), timeout_s=_PATIENCE_S)
    except Unavailable as error:
        progress.say(f"{error.message} Waiting for it.")
        discovery = await Discovery.connect(plan.etcd, plan.deployment, CollectorRegistry(), timeout_s=None)
    try:
        roll = RollCall(plan, discovery, supervisor, progress)
        unsubscribe = discovery.subscribe(roll.look)
        roll.look()
        yield roll
        unsubscribe()
    finally:
        await discovery.close()


async def first_answer(client: OpenAiClient, card: ModelCard, *, remote: bool) -> None:
    """Asks for a token until one comes, with `remote` through a prefill worker.

    An answer without a prefill worker is good enough in the end. Raises `Unavailable` when none comes.
    """
    started = time.monotonic()
    # Some engines hand over full blocks only.
    words = " the" * min(card.format.block_size, card.max_model_len // 2)
    for attempt in count(1):
        try:
            # A new prompt each time: a known one needs no prefill.
            async for _ in client.complete(card.name, f"{attempt}{words}", max_tokens=1):
                pass
        except TokenmillError as error:
            if time.monotonic() - started > _ANSWER_TIMEOUT_S:
                raise Unavailable(f"every part is up, but no request is answered: {error.message}") from error
        else:
            went_remote = client.usage is not None and client.usage.remote_tokens > 0
            if went_remote or not remote or time.monotonic() - started > _REMOTE_TIMEOUT_S:
                return
        await asyncio.sleep(_POLL_S)
