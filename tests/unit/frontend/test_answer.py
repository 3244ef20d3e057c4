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
from services.frontend.routing import Routing
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
    generation = Generation("r", "t", MODEL, array("I", [1, 2]), SamplingParams(**sampling), stop, Routing(), 0.0)
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
    answer.restart()
    answer.take(ids("hello"), (), 2.0)
    answer.finish(finished(STOP, tokens=5))
    assert (heard.text, answer.request_id, answer.completion_tokens) == ("hello", "r.2", 5)


LOST = Unavailable("lost")


@given(text=st.text(min_size=1, max_size=20), stop=st.text(min_size=1, max_size=3), data=st.data())
def test_wherever_its_workers_are_lost_an_answer_is_the_same(text: str, stop: str, data: st.DataObject) -> None:
    """Half a character and half a stop string are held back at the moment of a loss, and appear once."""

    async def check() -> None:
        whole, heard_whole = begin(stop=(stop,))
        whole.take(ids(text), (), 1.0)
        whole.finish(finished(STOP))
        answer, heard = begin(stop=(stop,))
        left = ids(text)
        while left and not answer.ended.done():
            size = data.draw(st.integers(1, 5))
            answer.take(left[:size], (), 1.0)
            left = left[size:]
            if data.draw(st.booleans()):
                answer.fail(LOST)
                if answer.ended.exception() is not None:
                    answer.resume()
        answer.finish(finished(STOP))
        assert (heard.text, heard.token_ids) == (heard_whole.text, heard_whole.token_ids)
        assert heard.end is not None
        assert heard_whole.end is not None
        assert heard.end[0] == heard_whole.end[0]
        assert heard.end[1].completion_tokens == heard_whole.end[1].completion_tokens

    asyncio.run(check())


async def test_what_is_left_to_do_has_the_tokens_as_prompt_and_smaller_budgets() -> None:
    answer, _ = begin(max_tokens=9, min_tokens=4)
    answer.take([5, 6, 7], (), 1.0)
    answer.fail(LOST)
    answer.resume()
    left = answer.generation
    assert (answer.request_id, answer.carried) == ("r.2", 3)
    assert (list(left.prompt), left.sampling.max_tokens, left.sampling.min_tokens) == ([1, 2, 5, 6, 7], 6, 1)
    answer.take([5, 6], (), 2.0)
    answer.fail(LOST)
    answer.resume()
    left = answer.generation
    assert (answer.request_id, answer.carried) == ("r.3", 5)
    assert (list(left.prompt), left.sampling.max_tokens, left.sampling.min_tokens) == ([1, 2, 5, 6, 7, 5, 6], 4, 0)


async def test_usage_is_of_the_prompt_that_was_asked_and_of_all_workers_tokens() -> None:
    answer, heard = begin()
    answer.take(ids("hello"), (), 1.0)
    answer.fail(LOST)
    answer.resume()
    answer.take(ids("!"), (), 2.0)
    usage = common_pb2.Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=6, remote_tokens=7)
    answer.finish(decode_pb2.Finished(slot=1, reason=STOP, usage=usage))
    assert (heard.text, heard.end) == ("hello!", (FinishReason.STOP, Usage(2, 6, 2, 2)))


async def test_the_router_hears_of_every_workers_first_token_and_time_to_first_token_counts_once() -> None:
    registry = CollectorRegistry()
    generation = Generation("r", "t", MODEL, array("I", [1, 2]), SamplingParams(), (), Routing(), 0.0)
    answer = Answer(generation, 0, Heard(), FrontendMetrics(registry))
    firsts = []
    answer.on_first_token = lambda: firsts.append(answer.request_id)
    for _ in range(2):
        answer.take([5], (), 1.0)
        answer.take([6], (), 2.0)
        answer.fail(LOST)
        answer.resume()
    assert firsts == ["r", "r.2"]
    assert registry.get_sample_value("tokenmill_ttft_seconds_count") == 1
    assert registry.get_sample_value("tokenmill_itl_seconds_count") == 3


@pytest.mark.parametrize(
    ("sampling", "token_ids", "reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7], FinishReason.LENGTH),
        ({}, [5] * 98, FinishReason.LENGTH),  # with the prompt's two the model's length is full
        ({}, [5, BUILTIN_EOS_TOKEN_ID], FinishReason.STOP),
        ({"stop_token_ids": (6,), "max_tokens": 2}, [5, 6], FinishReason.STOP),
        ({"max_tokens": 4}, [5, 6, 7], None),
        ({"ignore_eos": True}, [5, BUILTIN_EOS_TOKEN_ID], None),
    ],
)
async def test_an_answer_whose_last_token_has_come_needs_no_last_word(
    sampling: dict[str, Any], token_ids: list[int], reason: FinishReason | None
) -> None:
    answer, heard = begin(**sampling)
    answer.take(token_ids, (), 1.0)
    answer.fail(LOST)
    assert heard.end == (None if reason is None else (reason, Usage(2, len(token_ids))))
    assert (answer.ended.exception() is None) == (reason is not None)
