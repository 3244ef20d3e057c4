"""Merging and cutting of unsent output, against the plainest model there is: a list of tokens per slot."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidRequest
from engines.base import FinishReason, KvOutcome, TokenLogprob, Usage
from engines.host.convert import finished_to_proto
from engines.host.outbox import MAX_MESSAGE_BYTES, Outbox
from tokenmill.decode.v1 import decode_pb2

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
positions = st.lists(
    st.builds(TokenLogprob, st.integers(0, 2**32 - 1), st.floats(-50, 0, width=32)), min_size=1, max_size=4
)
actions = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), token_ids),
    st.tuples(
        st.just("add with logprobs"), st.integers(5, 8), st.lists(st.tuples(st.integers(0, 2**32 - 1), positions))
    ),
    st.tuples(st.just("finish"), st.integers(0, 8), st.none()),
    st.tuples(st.just("take"), st.none(), st.none()),
)


def an_end(slot: int) -> decode_pb2.Finished:
    return finished_to_proto(slot, FinishReason.STOP, Usage(7, 2**31), KvOutcome.READ, None)


@dataclass
class Received:
    """What a frontend makes of the messages."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=lambda: defaultdict(list))
    finished: list[int] = field(default_factory=list)

    def take(self, batch: decode_pb2.StepBatch) -> None:
        start = 0
        assert len(batch.slots) == len(batch.counts) == len(set(batch.slots))
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            assert slot not in self.finished, "tokens after the end"
            assert count > 0
            self.tokens[slot] += batch.token_ids[start : start + count]
            start += count
        assert start == len(batch.token_ids)
        counts = dict(zip(batch.slots, batch.counts, strict=True))
        for entry in batch.logprobs:
            assert len(entry.positions) == counts[entry.slot], "one position a token of this message"
            self.logprobs[entry.slot] += [[(one.token_id, one.logprob) for one in p.tokens] for p in entry.positions]
        self.finished += [one.slot for one in batch.finished]


@given(st.lists(actions, max_size=60), st.integers(400, 1200))
def test_every_token_arrives_once_in_order_and_no_message_is_too_large(
    script: list[tuple[str, Any, Any]], max_message_bytes: int
) -> None:
    outbox, received = Outbox(max_message_bytes), Received()
    slots = {number: outbox.open(number) for number in range(9)}
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[list[tuple[int, float]]]] = defaultdict(list)
    finished: set[int] = set()

    def take() -> None:
        batch = outbox.take()
        assert batch.ByteSize() <= max_message_bytes
        assert batch.slots or batch.finished or not outbox
        received.take(batch)

    for action, number, value in script:
        if action == "take":
            take()
        elif number in finished:
            continue
        elif action == "finish":
            finished.add(number)
            outbox.finish(slots[number], an_end(number))
        elif action == "add":
            tokens[number] += value
            outbox.add(slots[number], value)
        else:
            tokens[number] += [token for token, _ in value]
            logprobs[number] += [[(one.token_id, one.logprob) for one in position] for _, position in value]
            outbox.add(slots[number], [token for token, _ in value], [position for _, position in value])
    while outbox:
        take()

    assert {slot: ids for slot, ids in received.tokens.items() if ids} == {s: ids for s, ids in tokens.items() if ids}
    assert {slot: ps for slot, ps in received.logprobs.items() if ps} == {s: ps for s, ps in logprobs.items() if ps}
    assert sorted(received.finished) == sorted(finished)
    assert not outbox.take().ByteSize()


def test_tokens_of_many_steps_share_one_entry_per_slot() -> None:
    outbox = Outbox()
    one, two = outbox.open(1), outbox.open(2)
    for step in range(3):
        outbox.add(one, [step])
        outbox.add(two, [10 + step])
    batch = outbox.take()
    assert list(batch.slots) == [1, 2]
    assert list(batch.counts) == [3, 3]
    assert list(batch.token_ids) == [0, 1, 2, 10, 11, 12]


def test_a_large_backlog_is_cut_at_one_mebibyte() -> None:
    outbox = Outbox()
    slot = outbox.open(0)
    outbox.add(slot, [2**32 - 1] * 500_000)
    sizes = []
    while outbox:
        sizes.append(outbox.take().ByteSize())
    assert len(sizes) == 3
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert sizes[0] > 0.99 * MAX_MESSAGE_BYTES


def test_a_slot_is_taken_until_its_end_has_been_sent() -> None:
    outbox = Outbox()
    slot = outbox.open(3)
    with pytest.raises(InvalidRequest) as refused:
        outbox.open(3)
    assert refused.value.param == "slot"
    outbox.finish(slot, an_end(3))
    with pytest.raises(InvalidRequest):
        outbox.open(3)
    outbox.take()
    outbox.open(3)


def test_unsent_bytes_shrink_as_messages_are_taken() -> None:
    outbox = Outbox(max_message_bytes=1000)
    slot = outbox.open(0)
    assert outbox.add(slot, [1] * 300) >= 300
    before = slot.unsent_bytes
    outbox.take()
    assert 0 < slot.unsent_bytes < before
    while outbox:
        outbox.take()
    assert slot.unsent_bytes == 0


def test_dropped_tokens_leave_only_the_end() -> None:
    outbox = Outbox()
    slot = outbox.open(0)
    outbox.add(slot, [1, 2, 3])
    outbox.drop_unsent(slot)
    outbox.finish(slot, an_end(0))
    batch = outbox.take()
    assert not batch.token_ids
    assert [one.slot for one in batch.finished] == [0]
