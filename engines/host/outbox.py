"""What one Attach stream has yet to send: columns of tokens, merged per slot, cut into messages. Pure, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from controlplane.errors import InvalidRequest
from engines.base import TokenLogprob
from tokenmill.decode.v1 import decode_pb2

__all__ = ["MAX_MESSAGE_BYTES", "Outbox", "Slot"]

MAX_MESSAGE_BYTES = 1 << 20

# Upper bounds of what protobuf's encoding takes, so that no message need be encoded to know that it fits.
_TOKEN_BYTES = 5  # a varint of 32 bits
_SLOT_BYTES = 10  # its number and its count
_BATCH_BYTES = 32  # tags and lengths of the three packed columns
_FINISHED_BYTES = 6  # tag and length around a Finished
_SLOT_LOGPROBS_BYTES = 16  # tag, length and slot of a SlotLogprobs
_POSITION_BYTES = 6  # tag and length of a PositionLogprobs
_LOGPROB_BYTES = 13  # tag, length and the two fields of a TokenLogprob

Logprobs = Sequence[Sequence[TokenLogprob]]


class Slot:
    """One request's place in the stream, from `Outbox.open` until its end has been taken."""

    __slots__ = ("finished", "logprobs", "number", "queued", "token_ids", "unsent_bytes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.token_ids: list[int] = []
        self.logprobs: list[Sequence[TokenLogprob]] = []
        """As many as token_ids, or none."""
        self.unsent_bytes = 0
        """Never less than token_ids and logprobs will take on the wire."""
        self.finished: decode_pb2.Finished | None = None
        self.queued = False


class Outbox:
    """Unsent output of all requests of one stream. Tokens of a slot keep their order; slots take turns."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._slots: dict[int, Slot] = {}
        self._queue: deque[Slot] = deque()
        """Slots with something to send, the one that has waited longest first."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def open(self, number: int) -> Slot:
        """Gives a request its slot. Raises `InvalidRequest` while the slot is another's."""
        if number in self._slots:
            raise InvalidRequest(f"slot {number} is in use on this stream: choose another", param="slot")
        slot = self._slots[number] = Slot(number)
        return slot

    def close(self, slot: Slot) -> None:
        """Frees a slot that never had output: its request was refused."""
        del self._slots[slot.number]

    def add(self, slot: Slot, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> int:
        """Adds one step's tokens; returns the bytes that the slot now has unsent."""
        slot.token_ids += token_ids
        slot.unsent_bytes += _TOKEN_BYTES * len(token_ids)
        if logprobs is not None:
            slot.logprobs += logprobs
            slot.unsent_bytes += sum(map(_position_bytes, logprobs))
        if not slot.queued and token_ids:
            slot.queued = True
            self._queue.append(slot)
        return slot.unsent_bytes

    def finish(self, slot: Slot, finished: decode_pb2.Finished) -> None:
        """Ends a slot behind its last token. The slot is free again once this has been taken."""
        slot.finished = finished
        if not slot.queued:
            slot.queued = True
            self._queue.append(slot)

    def drop_unsent(self, slot: Slot) -> None:
        """Forgets what a slot has unsent, to make room; only sensible right before a failing `finish`."""
        slot.token_ids, slot.logprobs, slot.unsent_bytes = [], [], 0

    def take(self) -> decode_pb2.StepBatch:
        """The next message: all that is unsent, or as much as fits. Empty when nothing is."""
        numbers: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        finished: list[decode_pb2.Finished] = []
        logprobs: list[decode_pb2.SlotLogprobs] = []
        room = self._max_message_bytes - _BATCH_BYTES
        queue = self._queue
        while queue:
            slot = queue[0]
            if slot.token_ids:
                taken, positions, used = _take_tokens(slot, room)
                if not taken:
                    break
                room -= used
                numbers.append(slot.number)
                counts.append(len(taken))
                token_ids += taken
                if positions:
                    logprobs.append(_slot_logprobs(slot.number, positions))
                if slot.token_ids:
                    break
            if slot.finished is not None:
                room -= slot.finished.ByteSize() + _FINISHED_BYTES
                if room < 0:
                    break
                finished.append(slot.finished)
                del self._slots[slot.number]
            slot.queued = False
            queue.popleft()
        return decode_pb2.StepBatch(
            slots=numbers, counts=counts, token_ids=token_ids, finished=finished, logprobs=logprobs
        )


def _take_tokens(slot: Slot, room: int) -> tuple[list[int], list[Sequence[TokenLogprob]], int]:
    """Cuts off as many of a slot's first tokens as fit, with their log probabilities; also the bytes they take."""
    token_ids, positions = slot.token_ids, slot.logprobs
    overhead = _SLOT_BYTES + (_SLOT_LOGPROBS_BYTES if positions else 0)
    if slot.unsent_bytes + overhead <= room:
        used = slot.unsent_bytes
        slot.token_ids, slot.logprobs, slot.unsent_bytes = [], [], 0
        return token_ids, positions, used + overhead
    used = overhead
    count = 0
    if positions:
        for position in positions:
            needed = _TOKEN_BYTES + _position_bytes(position)
            if used + needed > room:
                break
            used += needed
            count += 1
    else:
        count = max((room - overhead) // _TOKEN_BYTES, 0)
        used += count * _TOKEN_BYTES
    slot.token_ids, slot.logprobs = token_ids[count:], positions[count:]
    slot.unsent_bytes -= used - overhead
    return token_ids[:count], positions[:count], used


def _position_bytes(position: Sequence[TokenLogprob]) -> int:
    return _POSITION_BYTES + _LOGPROB_BYTES * len(position)


def _slot_logprobs(number: int, positions: Sequence[Sequence[TokenLogprob]]) -> decode_pb2.SlotLogprobs:
    return decode_pb2.SlotLogprobs(
        slot=number,
        positions=[
            decode_pb2.PositionLogprobs(
                tokens=[decode_pb2.TokenLogprob(token_id=one.token_id, logprob=one.logprob) for one in position]
            )
            for position in positions
        ],
    )
