"""The workers a router may choose from, as discovery shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from controlplane.instances import Instance, State
from kvcache.format import KvFormat

__all__ = ["Pool", "Roster", "Worker"]


@dataclass(frozen=True, slots=True)
class Worker:
    """One instance in a worker role whose model is known."""

    instance_id: str
    epoch: int
    address: str
    role: str
    state: State
    format: KvFormat
    total_blocks: int


@dataclass(slots=True)
class Pool:
    """The workers of one model, in every state."""

    prefill: list[Worker] = field(default_factory=list)
    decode: list[Worker] = field(default_factory=list)


class Roster:
    """Every model's pool, replaced as a whole when discovery's picture changes."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def update(self, instances: Iterable[Instance]) -> None:
        """Takes the present picture. A model whose last worker went stays known: it is unavailable, not unknown."""
        for pool in self._pools.values():
            pool.prefill, pool.decode = [], []
        formats: dict[KvFormat, KvFormat] = {}  # equal formats become one object, so that comparing is cheap
        for instance in instances:
            card = instance.model
            if card is None or instance.role not in ("prefill", "decode"):
                continue
            worker = Worker(
                instance.instance_id,
                instance.epoch,
                instance.address,
                instance.role,
                instance.state,
                formats.setdefault(card.format, card.format),
                card.total_blocks,
            )
            pool = self._pools.setdefault(card.name, Pool())
            (pool.prefill if worker.role == "prefill" else pool.decode).append(worker)

    def pool(self, model: str) -> Pool | None:
        """The workers of a model; None: nobody has served it since this router started."""
        return self._pools.get(model)

    @property
    def models(self) -> list[str]:
        """Names of all models known."""
        return sorted(self._pools)

    def incompatible_pairs(self) -> Iterator[tuple[Worker, Worker]]:
        """(prefill, decode) workers of one model whose KV formats differ: no KV may pass between them."""
        for pool in self._pools.values():
            if len({worker.format for worker in (*pool.prefill, *pool.decode)}) > 1:
                for prefill in pool.prefill:
                    yield from ((prefill, decode) for decode in pool.decode if decode.format is not prefill.format)
