from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from controlplane.errors import InvalidRequest, Overloaded
from engines.base import FinishReason, KvOutcome, PrefillResult, SamplingParams, Usage
from engines.host.convert import (
    finished_to_proto,
    handle_age_s,
    handle_from_proto,
    handle_to_proto,
    sampling_from_proto,
)
from tests.scripted_engine import FORMAT
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2


def test_an_empty_sampling_message_means_every_documented_default() -> None:
    assert sampling_from_proto(common_pb2.Sampling()) == SamplingParams()


def test_every_sampling_field_arrives() -> None:
    message = common_pb2.Sampling(
        max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, presence_penalty=-1, frequency_penalty=1.5,
        repetition_penalty=1.25, seed=-4, stop_token_ids=[5, 6], ignore_eos=True, min_tokens=2, logprobs=0,
    )  # fmt: skip
    assert sampling_from_proto(message) == SamplingParams(9, 0.5, 0.25, 3, 0.125, -1, 1.5, 1.25, -4, (5, 6), True, 2, 0)
    assert {one.name for one in message.DESCRIPTOR.fields} == {one.name for one in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 2.5),
        ("repetition_penalty", 0),
        ("logprobs", 21),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"sampling.{field} is") as refused:
        sampling_from_proto(common_pb2.Sampling(**{field: value}))
    assert refused.value.param == f"sampling.{field}"


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling_from_proto(common_pb2.Sampling(max_tokens=3, min_tokens=4))
    assert refused.value.param == "sampling.min_tokens"


def test_a_handle_reaches_its_reader_whole() -> None:
    result = PrefillResult("h1", 48, 16, b"where", (b"a", b"b", b"c"), lease_s=120.0)
    message = handle_to_proto(result, FORMAT, instance_id="prefill-1", epoch=2**63, address="10.0.0.1:5000")
    message = common_pb2.KvHandle.FromString(message.SerializeToString())
    handle = handle_from_proto(message, received_at=17.5)
    assert (handle.handle_id, handle.instance_id, handle.epoch, handle.address) == (
        "h1", "prefill-1", 2**63, "10.0.0.1:5000",
    )  # fmt: skip
    assert handle.format == FORMAT
    assert (handle.tokens, handle.engine_params, handle.digests) == (48, b"where", (b"a", b"b", b"c"))
    assert (handle.received_at, handle.lease_s) == (17.5, 120.0)


def test_a_handle_is_as_old_as_its_spent_lease() -> None:
    assert handle_age_s(common_pb2.KvHandle(lease_ms=120_000, remaining_lease_ms=109_000)) == 11.0
    assert handle_age_s(common_pb2.KvHandle(remaining_lease_ms=109_000)) == 0, "a handle that does not tell its lease"


def test_an_end_carries_usage_outcome_and_error() -> None:
    error = Overloaded("full", retry_after_s=1.5)
    message = finished_to_proto(4, FinishReason.ERROR, Usage(1, 2, 3, 4), KvOutcome.TOO_OLD, error)
    assert message == decode_pb2.Finished(
        slot=4,
        reason=common_pb2.FINISH_REASON_ERROR,
        error=common_pb2.Error(code="overloaded", message="full", retry_after_ms=1500),
        usage=common_pb2.Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3, remote_tokens=4),
        kv_outcome=decode_pb2.KV_OUTCOME_TOO_OLD,
    )
    assert not finished_to_proto(0, FinishReason.STOP, Usage(1, 2), KvOutcome.NONE, None).HasField("error")


@pytest.mark.parametrize("outcome", KvOutcome)
def test_outcomes_have_the_same_numbers_on_the_wire(outcome: KvOutcome) -> None:
    name = "UNSPECIFIED" if outcome is KvOutcome.NONE else outcome.name
    assert decode_pb2.KvOutcome.Name(decode_pb2.KvOutcome.ValueType(outcome.value)) == f"KV_OUTCOME_{name}"


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_have_the_same_numbers_on_the_wire(reason: FinishReason) -> None:
    number = common_pb2.FinishReason.ValueType(reason.value)
    assert common_pb2.FinishReason.Name(number) == f"FINISH_REASON_{reason.name}"
