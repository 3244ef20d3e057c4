"""Asks an idle engine for one token, so that it cannot break unnoticed. Whether it moves, `stall` judges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controlplane.errors import TokenmillError
from controlplane.telemetry import get_logger
from engines.base import Engine, EngineRequest, SamplingParams, StepOutput
from engines.host.stall import READING_S

__all__ = ["Canary"]

_PROMPT = (0,)
"""Less than a block: it leaves nothing in the prefix cache, and nobody hears of it."""


class Canary:
    """One request of the host's own at a time. No caller waits for it and no counter of requests shows it."""

    def __init__(self, engine: Engine, idle_s: float) -> None:
        """`idle_s` 0: only when it is told to."""
        self._engine = engine
        self._most_idle = round(idle_s / READING_S)
        self._idle = 0
        """Readings in a row."""
        self._sent = 0
        self._asking: asyncio.Task[None] | None = None
        self._waiting_for = ""
        self._log = get_logger(__name__)

    @property
    def under_way(self) -> bool:
        """The engine has been asked and has not answered."""
        return bool(self._waiting_for)

    def observe(self, busy: int, *, now: bool) -> None:
        """Call at each reading. Asks an engine that has been idle for long, and one that is idle `now`."""
        if busy or self.under_way:
            self._idle = 0
            return
        self._idle += 1
        if now or (self._most_idle and self._idle >= self._most_idle):
            self._idle = 0
            self._sent += 1
            self._waiting_for = f"canary-{self._sent}"
            self._asking = asyncio.create_task(self._ask(self._waiting_for), name=self._waiting_for)

    async def close(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._waiting_for:
            self._engine.abort(self._waiting_for)

    async def _ask(self, request_id: str) -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        try:
            await self._engine.generate(EngineRequest(request_id, _PROMPT, sampling), self._on_step)
        except TokenmillError as error:
            self._log.warning("the engine refused a request of its host's own", reason=error.message)
            self._waiting_for = ""

    def _on_step(self, outputs: Sequence[StepOutput]) -> None:
        if any(one.finish is not None and one.request_id == self._waiting_for for one in outputs):
            self._waiting_for = ""
