from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.integration.engines.sim.running import Engine, PrefillWorker


@pytest.fixture
def prefill_worker() -> Iterator[Callable[..., PrefillWorker]]:
    """Starts prefill workers with the given config."""
    workers: list[PrefillWorker] = []

    def start(**config: Any) -> PrefillWorker:
        workers.append(PrefillWorker(**config))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """An engine as fast as it goes, able to read KV."""
    async with Engine() as engine:
        yield engine
