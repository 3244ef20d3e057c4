"""How the next token is chosen: read from a request, held against what the engine can do, told to a worker."""

from __future__ import annotations

from controlplane.errors import InvalidRequest, Unsupported
from engines.base import Capability, SamplingParams
from services.frontend.fields import Fields
from tokenmill.common.v1 import common_pb2

__all__ = ["check_capabilities", "needed_capabilities", "read_sampling", "read_token_ids", "sampling_to_proto"]

_MAX_UINT32 = 2**32 - 1
_MAX_STOP_TOKEN_IDS = 1024


def read_sampling(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Raises `InvalidRequest` naming the field. The two arguments are spelt differently by each API, and read by it."""
    temperature = fields.number("temperature", minimum=0, maximum=2)
    top_p = fields.number("top_p", minimum=0, maximum=1, above=True)
    repetition_penalty = fields.number("repetition_penalty", minimum=0, maximum=2, above=True)
    top_k = fields.integer("top_k", minimum=-1, maximum=_MAX_UINT32)  # -1: as vLLM's clients say "all"
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        min_p=fields.number("min_p", minimum=0, maximum=1) or 0.0,
        presence_penalty=fields.number("presence_penalty", minimum=-2, maximum=2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", minimum=-2, maximum=2) or 0.0,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
        seed=fields.integer("seed", minimum=-(2**63), maximum=2**63 - 1),
        stop_token_ids=read_token_ids(fields, "stop_token_ids", most=_MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=fields.integer("min_tokens", minimum=0, maximum=_MAX_UINT32) or 0,
        logprobs=logprobs,
    )
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, and it must not exceed max_tokens ({max_tokens})", param="min_tokens"
        )
    return sampling


def read_token_ids(fields: Fields, name: str, *, most: int) -> tuple[int, ...]:
    """A list of token ids; whether the model has them is checked once the model is known."""
    value = fields.take(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        type(token_id) is int and 0 <= token_id <= _MAX_UINT32 for token_id in value
    ):
        fields.refuse(name, value, "must be a list of token ids")
    if len(value) > most:
        fields.refuse(name, value, f"must have at most {most} entries")
    return tuple(value)


def needed_capabilities(sampling: SamplingParams, priority: int) -> dict[Capability, str]:
    """What an engine must be capable of, and the field that needs it."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    asked = (
        (sampling.logprobs is not None, Capability.LOGPROBS, "logprobs"),
        (sampling.seed is not None, Capability.SEED, "seed"),
        (penalties != (0.0, 0.0, 1.0), Capability.PENALTIES, "presence_penalty"),
        (sampling.min_tokens > 0, Capability.MIN_TOKENS, "min_tokens"),
        (priority != 0, Capability.PRIORITY, "priority"),
    )
    return {capability: param for wanted, capability, param in asked if wanted}


def check_capabilities(sampling: SamplingParams, priority: int, model: str, capabilities: tuple[str, ...]) -> None:
    """Raises `Unsupported` for what the model's engine said it lacks."""
    for capability, param in needed_capabilities(sampling, priority).items():
        if capability not in capabilities:
            raise Unsupported(f"the engine that serves {model} cannot do {capability.value}; leave it out", param=param)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.Sampling:
    """As workers are told it."""
    return common_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
    )
