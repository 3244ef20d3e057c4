"""What routers of one deployment tell each other: where each placed what, and what came of it. Pure.

Each enters the others' placements in its own book, predictions and sessions as if it had made them, some milliseconds
late. Nothing depends on it: what is lost, and what a router that died leaves behind, the workers' load reports put
right within an interval, and a router that hears nothing decides with what it knows itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from services.router.decision import Decision
from services.router.placements import Book, Share
from services.router.predictions import Predictions, sparse
from services.router.sessions import Sessions
from services.router.timing import pairs_of

__all__ = ["Event", "Notice", "Notices", "Part", "Placed", "Replicas", "Settled"]

MOST_UNSENT = 20_000
"""Notices kept for the bus; past it the oldest are lost."""
MOST_AT_ONCE = 500
"""Notices in one message: some 300 KB, where a prompt has 512 blocks."""


class Event(Enum):
    """What came of a placement."""

    PREFILLED = auto()
    FIRST_TOKEN = auto()
    FREED = auto()


@dataclass(frozen=True, slots=True)
class Part:
    """What one placement puts on one worker."""

    instance_id: str
    tokens: int
    """Prompt tokens it has to compute."""
    blocks: int
    """KV blocks it has to find room for."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request was given to these workers."""

    request_id: str
    decode: Part
    prefill: Part | None
    prompt_tokens: int
    some_hashes: Sequence[int]
    """See `predictions.sparse`."""
    session_id: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Something came of it."""

    request_id: str
    event: Event


Notice = Placed | Settled


@dataclass(frozen=True, slots=True)
class Notices:
    """One message of one router."""

    router_id: str
    epoch: int
    seq: int
    """From 1 in each epoch."""
    notices: Sequence[Notice]


@dataclass(slots=True)
class _Other:
    """Another router."""

    epoch: int
    seq: int
    placed: dict[str, None] = field(default_factory=dict)
    """Requests in flight that it placed, oldest first."""


class Replicas:
    """One router's side: what it has to tell, and what it was told. Times are a monotonic clock's, passed in."""

    def __init__(self, router_id: str, epoch: int, book: Book, predictions: Predictions, sessions: Sessions) -> None:
        self._router_id = router_id
        self._epoch = epoch
        self._book = book
        self._predictions = predictions
        self._sessions = sessions
        self._seq = 0
        self._unsent: deque[Notice] = deque(maxlen=MOST_UNSENT)
        self._others: dict[str, _Other] = {}
        self._alone = True
        self.lost = 0
        """Messages of others that never came."""

    def __len__(self) -> int:
        """Other routers heard of."""
        return len(self._others)

    # Own news

    def placed(self, decision: Decision) -> bool:
        """A decision was made here; what another router may have decided for the same request is void.

        Returns whether there is something to tell, as `settled` does.
        """
        for other in self._others.values():
            other.placed.pop(decision.request.request_id, None)
        if self._alone:
            return False
        request, prefill = decision.request, decision.prefill
        decode = Part(
            decision.decode.worker.instance_id,
            0 if prefill is not None else decision.decode.uncached_tokens,
            decision.decode.needed_blocks,
        )
        self._unsent.append(
            Placed(
                request.request_id,
                decode,
                Part(prefill.worker.instance_id, prefill.uncached_tokens, prefill.needed_blocks) if prefill else None,
                request.prompt_tokens,
                sparse(request.block_hashes),
                request.session_id,
            )
        )
        return True

    def settled(self, request_id: str, event: Event) -> bool:
        """A frontend told this router what came of a placement."""
        if not self._alone:
            self._unsent.append(Settled(request_id, event))
        return not self._alone

    def take(self) -> Notices | None:
        """The next message to the others; None: there is nothing to tell."""
        if not self._unsent:
            return None
        self._seq += 1
        notices = [self._unsent.popleft() for _ in range(min(len(self._unsent), MOST_AT_ONCE))]
        return Notices(self._router_id, self._epoch, self._seq, notices)

    # Others' news

    def keep(self, routers: Collection[str]) -> None:
        """These routers live, this one among them; what others placed is not counted any more."""
        for router_id in self._others.keys() - set(routers):
            self._forget(self._others.pop(router_id))
        self._alone = not any(router_id != self._router_id for router_id in routers)
        if self._alone:
            self._unsent.clear()

    def receive(self, news: Notices, now: float) -> None:
        """A message came. Those of an earlier life, or that came before, are left aside."""
        other = self._others.get(news.router_id)
        if other is None:
            other = self._others[news.router_id] = _Other(news.epoch, news.seq - 1)
        if news.epoch > other.epoch:
            self._forget(other)
            other.epoch, other.seq = news.epoch, 0
        if news.epoch < other.epoch or news.seq <= other.seq:
            return
        self.lost += news.seq - other.seq - 1
        other.seq = news.seq
        for notice in news.notices:
            match notice:
                case Placed():
                    self._enter(other, notice, now)
                case Settled():
                    self._settle(other, notice, now)
        while other.placed and self._book.placement(oldest := next(iter(other.placed))) is None:
            del other.placed[oldest]  # the book forgets what it hears nothing of

    def _enter(self, router: _Other, placed: Placed, now: float) -> None:
        for other in self._others.values():
            other.placed.pop(placed.request_id, None)
        router.placed[placed.request_id] = None
        decode, prefill = placed.decode, placed.prefill
        self._book.place(
            placed.request_id,
            _share(decode, placed.prompt_tokens, now if prefill is None else None),
            _share(prefill, placed.prompt_tokens, now) if prefill is not None else None,
            now,
        )
        for part in (decode, prefill):
            if part is not None and placed.some_hashes:
                self._predictions.add_sparse(part.instance_id, placed.some_hashes, now)
        if placed.session_id:
            self._sessions.settle(placed.session_id, decode.instance_id, now)

    def _settle(self, router: _Other, settled: Settled, now: float) -> None:
        if settled.request_id not in router.placed:
            return  # it has been placed elsewhere since
        match settled.event:
            case Event.PREFILLED:
                self._book.prefilled(settled.request_id, now)
            case Event.FIRST_TOKEN:
                self._book.computed(settled.request_id)
            case Event.FREED:
                del router.placed[settled.request_id]
                self._book.freed(settled.request_id)

    def _forget(self, other: _Other) -> None:
        for request_id in other.placed:
            self._book.freed(request_id)
        other.placed.clear()


def _share(part: Part, prompt_tokens: int, arrived_at: float | None) -> Share:
    return Share(part.instance_id, part.tokens, part.blocks, arrived_at, pairs_of(part.tokens, prompt_tokens))
