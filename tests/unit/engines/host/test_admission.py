from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.errors import InvalidRequest, NotFound, Unsupported
from engines.base import Capability, EngineInfo, EngineRequest, Handle, KvOutcome, SamplingParams
from engines.host.admission import check_decode, check_model, check_prefill, handle_verdict
from tests.scripted_engine import FORMAT, INFO

GOOD = EngineRequest("r", [1, 2, 3], SamplingParams())
HANDLE = Handle("h", "prefill-1", 1, "127.0.0.1:1", FORMAT, 3, b"", (), received_at=0.0, lease_s=100.0)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (replace(GOOD, prompt_token_ids=[]), "prompt_token_ids"),
        (replace(GOOD, prompt_token_ids=[1] * INFO.max_model_len), "prompt_token_ids"),
        (replace(GOOD, prompt_token_ids=[1, INFO.vocab_size]), "prompt_token_ids"),
    ],
    ids=["empty", "too long", "unknown token"],
)
def test_a_bad_prompt_is_refused_in_both_roles(request_: EngineRequest, param: str) -> None:
    for check in (check_decode, check_prefill):
        with pytest.raises(InvalidRequest) as refused:
            check(request_, INFO)
        assert refused.value.param == param


def test_a_prompt_that_leaves_room_for_one_token_is_taken() -> None:
    longest = replace(GOOD, prompt_token_ids=[INFO.vocab_size - 1] * (INFO.max_model_len - 1))
    check_decode(longest, INFO)
    check_prefill(longest, INFO)


@pytest.mark.parametrize(
    ("capability", "request_", "param"),
    [
        (Capability.LOGPROBS, replace(GOOD, sampling=SamplingParams(logprobs=0)), "sampling.logprobs"),
        (Capability.SEED, replace(GOOD, sampling=SamplingParams(seed=0)), "sampling.seed"),
        (Capability.PENALTIES, replace(GOOD, sampling=SamplingParams(presence_penalty=1)), "sampling.presence_penalty"),
        (Capability.PENALTIES, replace(GOOD, sampling=SamplingParams(repetition_penalty=1.1)),
         "sampling.repetition_penalty"),
        (Capability.MIN_TOKENS, replace(GOOD, sampling=SamplingParams(min_tokens=1)), "sampling.min_tokens"),
        (Capability.PRIORITY, replace(GOOD, priority=1), "priority"),
    ],
)  # fmt: skip
def test_what_the_engine_lacks_is_refused_by_name(capability: Capability, request_: EngineRequest, param: str) -> None:
    check_decode(request_, INFO)
    with pytest.raises(Unsupported, match=capability.value) as refused:
        check_decode(request_, replace(INFO, capabilities=INFO.capabilities - {capability}))
    assert refused.value.param == param


def test_an_engine_that_cannot_hold_kv_computes_no_prompt_for_others() -> None:
    with pytest.raises(Unsupported, match="hold_kv"):
        check_prefill(GOOD, replace(INFO, capabilities=INFO.capabilities - {Capability.HOLD_KV}))


def test_an_unknown_stop_token_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_decode(replace(GOOD, sampling=SamplingParams(stop_token_ids=(INFO.vocab_size,))), INFO)
    assert refused.value.param == "sampling.stop_token_ids"


def test_a_handle_of_more_tokens_than_the_prompt_has_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_decode(replace(GOOD, kv=replace(HANDLE, tokens=4)), INFO)
    assert refused.value.param == "kv.tokens"


def test_another_model_is_not_found() -> None:
    check_model("scripted", INFO)
    with pytest.raises(NotFound) as refused:
        check_model("other", INFO)
    assert refused.value.param == "model"


def test_a_handle_is_tried_only_when_young_held_and_of_the_same_format() -> None:
    def verdict(handle: Handle, age_s: float = 0.0, info: EngineInfo = INFO) -> KvOutcome:
        return handle_verdict(handle, age_s, info, max_age_s=10.0)

    assert verdict(HANDLE, 10.0) is KvOutcome.NONE
    assert verdict(HANDLE, 10.1) is KvOutcome.TOO_OLD
    assert verdict(replace(HANDLE, lease_s=0.0)) is KvOutcome.TOO_OLD
    assert verdict(replace(HANDLE, format=replace(FORMAT, block_size=32))) is KvOutcome.INCOMPATIBLE
    assert verdict(HANDLE, info=replace(INFO, capabilities=frozenset())) is KvOutcome.INCOMPATIBLE
