"""Carries what routers tell each other over NATS, gathered for some milliseconds."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence

from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.bus import Bus
from controlplane.telemetry import get_logger
from services.router.decision import Decision
from services.router.replicas import Event, Notice, Notices, Part, Placed, Replicas, Settled
from tokenmill.router.v1 import router_pb2

__all__ = ["ReplicaBus", "notices_from_bytes", "notices_to_bytes"]

GATHER_S = 0.005
"""Longest time that news waits for more: far less than a prompt takes."""


class ReplicaBus:
    """Tells the others what `replicas` has for them, and it what they tell."""

    def __init__(
        self, replicas: Replicas, bus: Bus, deployment: str, router_id: str, registry: CollectorRegistry
    ) -> None:
        self._replicas = replicas
        self._bus = bus
        self._subject = f"tokenmill.{deployment}.placements"
        self._router_id = router_id
        self._on_news: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._log = get_logger(__name__)
        notices = Counter(
            "tokenmill_router_notices",
            "Placements and outcomes that routers told each other",
            ["direction"],
            registry=registry,
        )
        self._sent, self._received = notices.labels("sent"), notices.labels("received")
        lost = Gauge("tokenmill_router_notices_lost", "Messages of other routers that never came", registry=registry)
        lost.set_function(lambda: replicas.lost)
        others = Gauge("tokenmill_router_replicas", "Other routers that were heard of", registry=registry)
        others.set_function(lambda: len(replicas))

    async def begin(self, on_news: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        """Listens; `on_news` is called after each message. Returns how to end it."""
        self._on_news = on_news
        return await self._bus.subscribe(f"{self._subject}.*", self._on_message, lambda: None)

    def placed(self, decision: Decision) -> None:
        """A decision was made here."""
        if self._replicas.placed(decision):
            self._tell_soon()

    def settled(self, request_id: str, event: Event) -> None:
        """Something came of a decision that was made here."""
        if self._replicas.settled(request_id, event):
            self._tell_soon()

    def keep(self, routers: Collection[str]) -> None:
        """These routers live, this one among them."""
        self._replicas.keep(routers)

    def close(self) -> None:
        """Tells what is left, and nothing after that."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def _tell_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        while (news := self._replicas.take()) is not None:
            self._bus.publish(f"{self._subject}.{self._router_id}", notices_to_bytes(news))
            self._sent.inc(len(news.notices))

    def _on_message(self, subject: str, data: bytes) -> None:
        if subject.rpartition(".")[2] == self._router_id:
            return  # NATS brings our own, too
        try:
            news = notices_from_bytes(data)
        except (DecodeError, ValueError) as error:
            self._log.warning("another router's news cannot be read", subject=subject, error=str(error))
            return
        self._received.inc(len(news.notices))
        self._replicas.receive(news, time.monotonic())
        self._on_news()


def notices_to_bytes(news: Notices) -> bytes:
    """As published."""
    return router_pb2.PlacementNotices(
        router_id=news.router_id,
        epoch=news.epoch,
        seq=news.seq,
        notices=[_notice_to_proto(notice) for notice in news.notices],
    ).SerializeToString()


def notices_from_bytes(data: bytes) -> Notices:
    """Raises `DecodeError`, or `ValueError`. What this version does not know is left out."""
    message = router_pb2.PlacementNotices.FromString(data)
    notices = [notice for one in message.notices if (notice := _notice_from_proto(one)) is not None]
    return Notices(message.router_id, message.epoch, message.seq, notices)


def _notice_to_proto(notice: Notice) -> router_pb2.PlacementNotice:
    if isinstance(notice, Placed):
        placed = router_pb2.Placed(
            request_id=notice.request_id,
            decode=_part_to_proto(notice.decode),
            prefill=_part_to_proto(notice.prefill) if notice.prefill is not None else None,
            sparse_hashes=array("Q", notice.some_hashes).tobytes(),
            prompt_tokens=notice.prompt_tokens,
            session_id=notice.session_id,
        )
        return router_pb2.PlacementNotice(placed=placed)
    outcome = router_pb2.Outcome(request_id=notice.request_id)
    match notice.event:
        case Event.PREFILLED:
            outcome.prefill_done.SetInParent()
        case Event.FIRST_TOKEN:
            outcome.first_token.SetInParent()
        case Event.FREED:
            outcome.freed.SetInParent()
    return router_pb2.PlacementNotice(outcome=outcome)


def _notice_from_proto(notice: router_pb2.PlacementNotice) -> Notice | None:
    match notice.WhichOneof("notice"):
        case "placed":
            placed = notice.placed
            return Placed(
                placed.request_id,
                _part_from_proto(placed.decode),
                _part_from_proto(placed.prefill) if placed.HasField("prefill") else None,
                placed.prompt_tokens,
                _hashes(placed.sparse_hashes),
                placed.session_id,
            )
        case "outcome":
            event = _EVENTS.get(notice.outcome.WhichOneof("outcome") or "")
            return Settled(notice.outcome.request_id, event) if event is not None else None
        case _:
            return None


_EVENTS = {"prefill_done": Event.PREFILLED, "first_token": Event.FIRST_TOKEN, "freed": Event.FREED}


def _hashes(packed: bytes) -> Sequence[int]:
    """Raises `ValueError` for what is no whole number of hashes."""
    return array("Q", packed).tolist()


def _part_to_proto(part: Part) -> router_pb2.PlacedShare:
    return router_pb2.PlacedShare(instance_id=part.instance_id, tokens=part.tokens, blocks=part.blocks)


def _part_from_proto(part: router_pb2.PlacedShare) -> Part:
    return Part(part.instance_id, part.tokens, part.blocks)
