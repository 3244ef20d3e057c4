"""Which requests an engine may hear of, and which KV handles are worth trying. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from engines.base import Capability, EngineInfo, EngineRequest, Handle, KvOutcome, SamplingParams

__all__ = ["check_decode", "check_epoch", "check_model", "check_prefill", "handle_verdict"]


def check_model(name: str, info: EngineInfo) -> None:
    """Raises `NotFound` unless this engine serves the model."""
    if name != info.model:
        raise NotFound(f"model {name!r} is not served here: this worker serves {info.model!r}", param="model")


def check_epoch(asked: int, own: int) -> None:
    """Raises `Unavailable` for a request meant for another life of this instance. 0: meant for any."""
    if asked not in (0, own):
        raise Unavailable(f"this worker's epoch is {own}, not {asked}: look it up again", param="epoch")


def check_decode(request: EngineRequest, info: EngineInfo) -> None:
    """Raises `InvalidRequest` or `Unsupported` for what this engine cannot answer."""
    _check_prompt(request, info)
    sampling = request.sampling
    _check_tokens_known(sampling.stop_token_ids, info, "sampling.stop_token_ids")
    for capability, param, needed in _needs(sampling):
        if needed:
            _check_capable(info, capability, param)
    if request.kv is not None and request.kv.tokens > len(request.prompt_token_ids):
        raise InvalidRequest(
            f"kv.tokens is {request.kv.tokens}, more than the prompt's {len(request.prompt_token_ids)}: "
            "the handle is of another prompt",
            param="kv.tokens",
        )


def check_prefill(request: EngineRequest, info: EngineInfo) -> None:
    """Raises `InvalidRequest` or `Unsupported` for a prompt that this engine cannot compute and hold."""
    _check_prompt(request, info)
    _check_capable(info, Capability.HOLD_KV, "")


def handle_verdict(handle: Handle, age_s: float, info: EngineInfo, max_age_s: float) -> KvOutcome:
    """NONE when the handle is worth trying, else why it is not."""
    if handle.format != info.format or Capability.REMOTE_PREFILL not in info.capabilities:
        return KvOutcome.INCOMPATIBLE
    if age_s > max_age_s or handle.lease_s <= 0:
        return KvOutcome.TOO_OLD
    return KvOutcome.NONE


def _check_prompt(request: EngineRequest, info: EngineInfo) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("prompt_token_ids is empty: a prompt has at least one token", param="prompt_token_ids")
    if len(prompt) >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; with at least one token of answer it must fit in the model's "
            f"{info.max_model_len}: shorten it",
            param="prompt_token_ids",
        )
    _check_tokens_known(prompt, info, "prompt_token_ids")
    if request.priority:
        _check_capable(info, Capability.PRIORITY, "priority")


def _check_tokens_known(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    if token_ids and max(token_ids) >= info.vocab_size:
        raise InvalidRequest(f"{param} has a token id past the vocabulary of {info.vocab_size} tokens", param=param)


def _needs(sampling: SamplingParams) -> tuple[tuple[Capability, str, bool], ...]:
    return (
        (Capability.LOGPROBS, "sampling.logprobs", sampling.logprobs is not None),
        (Capability.SEED, "sampling.seed", sampling.seed is not None),
        (Capability.PENALTIES, "sampling.presence_penalty", sampling.presence_penalty != 0),
        (Capability.PENALTIES, "sampling.frequency_penalty", sampling.frequency_penalty != 0),
        (Capability.PENALTIES, "sampling.repetition_penalty", sampling.repetition_penalty != 1),
        (Capability.MIN_TOKENS, "sampling.min_tokens", sampling.min_tokens > 0),
    )


def _check_capable(info: EngineInfo, capability: Capability, param: str) -> None:
    if capability not in info.capabilities:
        raise Unsupported(
            f"the engine {info.format.engine} lacks {capability.value}{f', which {param} needs' if param else ''}",
            param=param,
        )
