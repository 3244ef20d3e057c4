"""The workers a router may choose from, as discovery shows them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from controlplane.instances import Instance, State
from kvcache.format import KvFormat

__all__ = ["Choice", "Pool", "Roster", "Worker"]


@dataclass(frozen=True, slots=True)
class Worker:
    """One instance in a worker role whose model is known."""

    instance_id: str
    epoch: int
    address: str
    role: str
    state: State
    format: KvFormat
    total_blocks: int = 0
    """KV blocks it has in all; 0, here and below: not known, no limit."""
    max_num_seqs: int = 0
    """Requests it runs at a time."""
    max_batched_tokens: int = 0
    """Tokens it computes in one step."""
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted."""
    capabilities: frozenset[str] = frozenset()
    loras: frozenset[str] = frozenset()
    """LoRA adapters it serves."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers that may take a request."""

    decode: Sequence[Worker]
    """All of them, whether or not a prefill worker fits."""
    paired: Sequence[Worker]
    """Decode workers that can read the KV of some worker in `prefill`."""
    prefill: Sequence[Worker]


class Pool:
    """The workers of one model, in every state."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = tuple(workers)
        self._everyone = self._choose(self.workers)

    def of_role(self, role: str) -> list[Worker]:
        """Those of one role, in every state."""
        return [worker for worker in self.workers if worker.role == role]

    def choice(self, excluded: Collection[str]) -> Choice:
        """Those that are READY; where no decode worker is, those that have only gone quiet: better them than nobody.

        A quiet prefill worker is not waited for: decode can compute the prompt itself.
        """
        if not excluded:
            return self._everyone
        return self._choose([worker for worker in self.workers if worker.instance_id not in excluded])

    def _choose(self, workers: Sequence[Worker]) -> Choice:
        def those(role: str, state: State) -> list[Worker]:
            return [worker for worker in workers if worker.role == role and worker.state is state]

        decode = those("decode", State.READY) or those("decode", State.SUSPECT)
        prefill = those("prefill", State.READY)
        formats = {worker.format for worker in prefill}
        return Choice(decode, [worker for worker in decode if worker.format in formats], prefill)


class Roster:
    """Every model's pool, replaced as a whole when discovery's picture changes."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def update(self, instances: Iterable[Instance]) -> None:
        """Takes the present picture. A model whose last worker went stays known: it is unavailable, not unknown."""
        workers: dict[str, list[Worker]] = {model: [] for model in self._pools}
        formats: dict[KvFormat, KvFormat] = {}  # equal formats become one object, so that comparing is cheap
        for instance in instances:
            card = instance.model
            if card is not None and instance.role in ("prefill", "decode"):
                workers.setdefault(card.name, []).append(
                    Worker(
                        instance.instance_id,
                        instance.epoch,
                        instance.address,
                        instance.role,
                        instance.state,
                        formats.setdefault(card.format, card.format),
                        card.total_blocks,
                        card.max_num_seqs,
                        card.max_batched_tokens,
                        tuple(sorted(instance.labels.items())),
                        frozenset(card.capabilities),
                        frozenset(card.loras),
                    )
                )
        self._pools = {model: Pool(those) for model, those in workers.items()}

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
            if len({worker.format for worker in pool.workers}) > 1:
                decoders = pool.of_role("decode")
                for prefill in pool.of_role("prefill"):
                    yield from ((prefill, decode) for decode in decoders if decode.format is not prefill.format)
