"""Protobuf to and from `engines.base`, once, at the worker's edge.

What comes in is checked against its documented range; an `InvalidRequest` names the field.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from controlplane.errors import InvalidRequest, TokenmillError
from controlplane.grpc_errors import to_proto
from engines.base import (
    MAX_LOGPROBS,
    FinishReason,
    Handle,
    KvOutcome,
    LoadSnapshot,
    PrefillResult,
    SamplingParams,
    Usage,
)
from kvcache.format import KvFormat
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

__all__ = [
    "finished_to_proto",
    "handle_age_s",
    "handle_from_proto",
    "handle_to_proto",
    "pulse_to_proto",
    "sampling_from_proto",
]


def sampling_from_proto(message: common_pb2.Sampling) -> SamplingParams:
    """Every field in its documented range, defaults filled in."""
    given: dict[str, Any] = {descriptor.name: value for descriptor, value in message.ListFields()}
    sampling = SamplingParams(**given | {"stop_token_ids": tuple(message.stop_token_ids)})
    _require(sampling.max_tokens is None or sampling.max_tokens >= 1, "max_tokens", sampling.max_tokens, "at least 1")
    for name, (low, high) in _CLOSED_RANGES.items():
        value = getattr(sampling, name)
        _require(low <= value <= high, name, value, f"from {low:g} to {high:g}")
    for name, high in _OPEN_RANGES.items():
        value = getattr(sampling, name)
        _require(0 < value <= high, name, value, f"more than 0 and at most {high:g}")
    if sampling.max_tokens is not None:
        _require(sampling.min_tokens <= sampling.max_tokens, "min_tokens", sampling.min_tokens, "at most max_tokens")
    if sampling.logprobs is not None:
        _require(sampling.logprobs <= MAX_LOGPROBS, "logprobs", sampling.logprobs, f"at most {MAX_LOGPROBS}")
    return sampling


_CLOSED_RANGES = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_OPEN_RANGES = {"top_p": 1, "repetition_penalty": 2}


def _require(holds: bool, name: str, value: object, must_be: str) -> None:
    if not holds:
        raise InvalidRequest(f"sampling.{name} is {value}; it must be {must_be}", param=f"sampling.{name}")


def handle_from_proto(message: common_pb2.KvHandle, received_at: float) -> Handle:
    """`received_at` is `time.monotonic()` when the message came."""
    return Handle(
        handle_id=message.handle_id,
        instance_id=message.instance_id,
        epoch=message.epoch,
        address=message.address,
        format=KvFormat(**{one.name: getattr(message.format, one.name) for one in fields(KvFormat)}),
        tokens=message.tokens,
        engine_params=message.engine_params,
        digests=tuple(message.digests),
        received_at=received_at,
        lease_s=message.remaining_lease_ms / 1000,
    )


def handle_age_s(message: common_pb2.KvHandle) -> float:
    """How old the handle was when the message came; 0 when it does not tell its whole lease."""
    return max(message.lease_ms - message.remaining_lease_ms, 0) / 1000


def handle_to_proto(
    result: PrefillResult, kv_format: KvFormat, *, instance_id: str, epoch: int, address: str
) -> common_pb2.KvHandle:
    """The handle as its maker sends it, with the whole lease still to run."""
    lease_ms = int(result.lease_s * 1000)
    return common_pb2.KvHandle(
        handle_id=result.handle_id,
        instance_id=instance_id,
        epoch=epoch,
        address=address,
        format=common_pb2.KvFormat(**{one.name: getattr(kv_format, one.name) for one in fields(KvFormat)}),
        remaining_lease_ms=lease_ms,
        tokens=result.tokens,
        engine_params=result.engine_params,
        digests=result.digests,
        lease_ms=lease_ms,
    )


def finished_to_proto(
    slot: int, reason: FinishReason, usage: Usage, outcome: KvOutcome, error: TokenmillError | None
) -> decode_pb2.Finished:
    """The end of one answer. `error` is given exactly when `reason` is ERROR."""
    return decode_pb2.Finished(
        slot=slot,
        reason=common_pb2.FinishReason.ValueType(reason.value),
        error=to_proto(error) if error is not None else None,
        usage=common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            remote_tokens=usage.remote_tokens,
        ),
        kv_outcome=decode_pb2.KvOutcome.ValueType(outcome.value),
    )


def pulse_to_proto(load: LoadSnapshot) -> decode_pb2.Pulse:
    """What frontends are told of the engine once a second."""
    return decode_pb2.Pulse(
        waiting_requests=load.waiting_requests,
        queued_prefill_tokens=load.queued_prefill_tokens,
        step_time_us=round(load.step_time_s * 1e6),
        steps=load.steps,
    )
