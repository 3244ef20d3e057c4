"""The workers a router may choose from, as discovery shows them, and which of them fit a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from controlplane.instances import Instance, State
from kvcache.format import KvFormat
from services.router.placements import Book, Load, LoadColumns
from services.router.request import Request
from services.router.timing import Timing, Timings

__all__ = ["Choice", "Group", "Pool", "Roster", "Worker"]

_MOST_CHOICES = 256
"""Combinations of LoRA, labels and capabilities whose workers a pool remembers."""


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

    def lacks(self, request: Request) -> str:
        """What the request wants and this worker never has, for a person; empty: nothing."""
        if request.lora and request.lora not in self.loras:
            return f"without LoRA {request.lora}"
        for name, value in request.labels.items():
            if (name, value) not in self.labels:
                return f"not labelled {name}={value}"
        missing = [name for name in request.capabilities if name not in self.capabilities]
        return f"not capable of {', '.join(missing)}" if missing else ""


class Group:
    """Workers that are asked for together, again and again: what is looked up by name is looked up once."""

    __slots__ = ("_columns", "_generation", "_loads", "_seen", "_timings", "block_size", "block_sizes", "ids",
                 "position", "workers")  # fmt: skip

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.ids = [worker.instance_id for worker in self.workers]
        self.position = {instance_id: at for at, instance_id in enumerate(self.ids)}
        self.block_sizes = [worker.format.block_size for worker in self.workers]
        self.block_size = self.block_sizes[0] if len(set(self.block_sizes)) == 1 else 0
        """0: they differ."""
        self._generation = (-1, -1)
        self._seen = 0
        """Of `Book.changed`."""
        self._loads: list[Load] = []
        self._timings: list[Timing] = []
        self._columns = LoadColumns([], [], [], [])

    def refresh(self, book: Book, timings: Timings) -> tuple[LoadColumns, list[Timing]]:
        """Every worker's load and timing. The columns are the caller's own."""
        generation = (book.generation, timings.generation)
        if generation != self._generation:
            self._loads = [book.load(instance_id) for instance_id in self.ids]
            # Of one model in either role: a decode worker that never computed a prompt is as fast as those that did.
            self._timings = [timings.of(one.instance_id, one.format.model_fingerprint) for one in self.workers]
            self._columns = LoadColumns.of(self._loads)
            self._generation = generation
        else:
            for instance_id in book.changed[self._seen :]:
                if (at := self.position.get(instance_id)) is not None:
                    self._columns.set(at, self._loads[at])
        self._seen = len(book.changed)
        return self._columns.copy(), self._timings


class Choice:
    """The workers that may take a request."""

    __slots__ = ("_prefill", "decode", "paired")

    def __init__(self, decode: Sequence[Worker], prefill: Sequence[Worker]) -> None:
        self._prefill = {
            kv_format: Group([worker for worker in prefill if worker.format is kv_format])
            for kv_format in {worker.format for worker in decode}
        }
        self.decode = Group(decode)
        """All of them, whether or not a prefill worker fits."""
        self.paired = Group([worker for worker in decode if self._prefill[worker.format].workers])
        """Those that can read the KV of some prefill worker."""

    def prefill_for(self, decode: Worker) -> Group:
        """Prefill workers whose KV one of `decode` can read."""
        return self._prefill[decode.format]


class Pool:
    """The workers of one model, in every state. Never changes: a new picture is a new pool."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = tuple(workers)
        self._choices: dict[object, Choice] = {}

    def of_role(self, role: str) -> list[Worker]:
        """Those of one role, in every state."""
        return [worker for worker in self.workers if worker.role == role]

    def has(self, instance_id: str) -> bool:
        """Whether this decode worker lives, and may do so for longer than a moment."""
        return any(
            worker.instance_id == instance_id and worker.state in (State.READY, State.SUSPECT)
            for worker in self.workers
        )

    def choice(self, request: Request, only: str = "") -> Choice:
        """Those that have what it wants, are not excluded and READY; `only`: no other decode worker.

        Where no such decode worker is, those that it would rather avoid, then those that have only gone quiet: better
        them than nobody. A quiet or avoided prefill worker is not waited for: decode can compute the prompt itself.
        """
        if not only and not request.is_particular:
            return self._remembered((), request)
        if not (only or request.excluded or request.avoided):
            key = (request.lora, tuple(sorted(request.labels.items())), tuple(sorted(request.capabilities)))
            return self._remembered(key, request)
        return self._choose(request, only)

    def unfit(self, worker: Worker, request: Request, only: str = "") -> str:
        """Why this worker cannot take it, for a person; empty: it can, if no better one is there."""
        if worker.state not in (State.READY, State.SUSPECT):
            return str(worker.state)
        if worker.instance_id in request.excluded:
            return "excluded"
        if only and worker.role == "decode" and worker.instance_id != only:
            return "pinned to another" if request.pinned else f"not {only}, where the session is"
        return worker.lacks(request)

    def passed_over(self, worker: Worker, request: Request, only: str = "") -> str:
        """Why a worker that was not considered was not."""
        if reason := self.unfit(worker, request, only):
            return reason
        if worker.instance_id in request.avoided:
            return "avoided"
        if worker.state is State.SUSPECT:
            return str(worker.state)
        return "no remote prefill, or no pair of equal KV formats"

    def _remembered(self, key: object, request: Request) -> Choice:
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= _MOST_CHOICES:
                self._choices.clear()
            choice = self._choices[key] = self._choose(request, "")
        return choice

    def _choose(self, request: Request, only: str) -> Choice:
        fit = [worker for worker in self.workers if not self.unfit(worker, request, only)]

        def those(role: str, wanted: Callable[[Worker], bool]) -> list[Worker]:
            return [worker for worker in fit if worker.role == role and wanted(worker)]

        def is_good(worker: Worker) -> bool:
            return worker.state is State.READY and worker.instance_id not in request.avoided

        decode = (
            those("decode", is_good)
            or those("decode", lambda worker: worker.state is State.READY)
            or those("decode", lambda worker: True)
        )
        return Choice(decode, those("prefill", is_good))


class Roster:
    """Every model's pool, replaced as a whole when discovery's picture changes."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._seen: dict[str, tuple[Instance, Worker]] = {}

    def update(self, instances: Iterable[Instance]) -> None:
        """Takes the present picture. A model whose last worker went stays known: it is unavailable, not unknown."""
        workers: dict[str, list[Worker]] = {model: [] for model in self._pools}
        formats: dict[KvFormat, KvFormat] = {}  # equal formats become one object, so that comparing is cheap
        for _, known in self._seen.values():
            formats.setdefault(known.format, known.format)
        seen: dict[str, tuple[Instance, Worker]] = {}
        for instance in instances:
            card = instance.model
            if card is None or instance.role not in ("prefill", "decode"):
                continue
            before = self._seen.get(instance.instance_id)
            if before is not None and before[0] is instance:
                worker = before[1]
            else:
                worker = Worker(
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
            seen[instance.instance_id] = (instance, worker)
            workers.setdefault(card.name, []).append(worker)
        self._seen = seen
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
