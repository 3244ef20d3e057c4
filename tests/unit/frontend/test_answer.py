"""One answer: text, ends, stop strings and usage, fed as a decode stream feeds it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from controlplane.errors import EngineFailed, Unavailable
from controlplane.instances import ModelCard
from engines.base import FinishReason, SamplingParams, Usage
from engines.sim.tokenizer import BUILTIN_EOS_TOKEN_ID, BUILTIN_VOCAB_SIZE
from kvcache.format import KvFormat
from services.frontend.answer import Answer, Logprobs
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import ServedModel
from services.frontend.tokenizer import Tokenizer
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

TOKENIZER = Tokenizer.load("builtin")
CARD = ModelCard(
    name="m", tokenizer="builtin", format=KvFormat("f", "float32", 16, "l", "sim", "1", "tp1-pp1"), max_model_len=100,
    vocab_size=BUILTIN_VOCAB_SIZE, total_blocks=10, max_num_seqs=4, max_batched_tokens=64,
    eos_token_ids=(BUILTIN_EOS_TOKEN_ID,),
)  # fmt: skip
MODEL = ServedModel(CARD, TOKENIZER, None, root=1, loaded_at=0)


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.end: tuple[FinishReason, Usage] | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def on_output(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        self.texts.append(text)
        self.token_ids += token_ids

    def on_end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        self.end = reason, usage

    def on_restart(self, index: int) -> bool:
        self.texts, self.token_ids = [], []
        return True


def begin(stop: tuple[str, ...] = (), **sampling: Any) -> tuple[Answer, Heard]:
    heard = Heard()
    generation = Generation("r", "t", MODEL, array("I", [1, 2]), SamplingParams(**sampling), stop, 0, 0.0)
    return Answer(generation, 0, heard, FrontendMetrics(CollectorRegistry())), heard


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def finished(reason: common_pb2.FinishReason.ValueType, tokens: int = 0, **fields: Any) -> decode_pb2.Finished:
    usage = common_pb2.Usage(prompt_tokens=2, completion_tokens=tokens, cached_tokens=1, remote_tokens=1)
    return decode_pb2.Finished(slot=1, reason=reason, usage=usage, **fields)


STOP = common_pb2.FINISH_REASON_STOP


async def test_tokens_become_text_and_the_end_has_the_workers_usage() -> None:
    answer, heard = begin()
    answer.take(ids("hello"), (), 1.0)
    answer.finish(finished(STOP, tokens=5))
    assert (heard.text, heard.end) == ("hello", (FinishReason.STOP, Usage(2, 5, 1, 1)))
    assert answer.ended.done()


async def test_the_end_token_is_counted_and_has_no_text() -> None:
    answer, heard = begin(stop_token_ids=tuple(ids("!")))
    answer.take([*ids("hi"), *ids("!")], (), 1.0)
    answer.finish(finished(STOP, tokens=3))
    assert (heard.text, heard.end) == ("hi", (FinishReason.STOP, Usage(2, 3, 1, 1)))


async def test_a_stop_string_ends_the_answer_and_counts_only_the_tokens_up_to_it() -> None:
    answer, heard = begin(stop=("lo",))
    stopped = []
    answer.on_stop = lambda: stopped.append(True)
    answer.take(ids("hello world"), (), 1.0)
    assert (heard.text, stopped, answer.ended.done()) == ("hel", [True], False)
    answer.take(ids("late"), (), 2.0)
    answer.finish(finished(common_pb2.FINISH_REASON_CANCELLED, tokens=99))
    assert (heard.text, heard.token_ids) == ("hel", ids("hello"))
    assert heard.end == (FinishReason.STOP, Usage(2, 5, 1, 1))


async def test_a_stopped_answer_whose_worker_is_silent_ends_with_what_is_known() -> None:
    answer, heard = begin(stop=("lo",))
    answer.take(ids("hello"), (), 1.0)
    answer.fail(Unavailable("no word"))
    assert heard.end == (FinishReason.STOP, Usage(2, 5))


async def test_no_stop_string_counts_before_min_tokens() -> None:
    answer, heard = begin(stop=("l",), min_tokens=4)
    answer.take(ids("hello l"), (), 1.0)
    answer.fail(Unavailable("no word"))
    assert heard.text == "hello "


async def test_text_that_might_have_become_a_stop_string_appears_at_the_end() -> None:
    answer, heard = begin(stop=("low",))
    answer.take(ids("hello"), (), 1.0)
    assert heard.text == "hel"
    answer.finish(finished(common_pb2.FINISH_REASON_LENGTH, tokens=5))
    assert (heard.text, heard.end) == ("hello", (FinishReason.LENGTH, Usage(2, 5, 1, 1)))


@given(text=st.text(max_size=20), data=st.data())
def test_all_pieces_together_are_the_text_and_no_piece_is_broken(text: str, data: st.DataObject) -> None:
    async def check() -> None:
        answer, heard = begin(stop=("\x00never",))
        left = ids(text)
        while left:
            size = data.draw(st.integers(1, 5))
            answer.take(left[:size], (), 1.0)
            left = left[size:]
        answer.finish(finished(STOP))
        assert heard.text == text
        assert all("\ufffd" not in piece for piece in heard.texts if "\ufffd" not in text)

    asyncio.run(check())


async def test_a_failed_answer_raises_the_workers_error() -> None:
    answer, heard = begin()
    error = common_pb2.Error(code="engine_failed", message="boom")
    answer.finish(finished(common_pb2.FINISH_REASON_ERROR, error=error))
    with pytest.raises(EngineFailed, match="boom"):
        await answer.ended
    assert heard.end is None


async def test_an_answer_begun_again_has_another_name_and_nothing_of_the_first() -> None:
    answer, heard = begin()
    answer.take(ids("👋")[:2], (), 1.0)
    answer.fail(Unavailable("lost"))
    assert answer.restart()
    answer.take(ids("hello"), (), 2.0)
    answer.finish(finished(STOP, tokens=5))
    assert (heard.text, answer.request_id, answer.completion_tokens) == ("hello", "r.2", 5)
