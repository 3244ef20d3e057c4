"""One answer to be made: a request held against its model, ready for the workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from controlplane.errors import InvalidRequest, Unsupported
from engines.base import SamplingParams
from kvcache.hashing import hash_blocks
from services.frontend.models import ServedModel
from services.frontend.openai_errors import ContextLengthExceeded
from services.frontend.openai_requests import Options
from services.frontend.routing import Routing
from services.frontend.sampling import check_capabilities

__all__ = ["Generation", "chat_prompt", "make_generations"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What the workers are told, and what is done with its text here. One choice of one request."""

    request_id: str
    """Unique on every worker."""
    trace_id: str
    """The client's x-request-id, in every call's metadata."""
    model: ServedModel
    prompt: array[int]
    sampling: SamplingParams
    stop: tuple[str, ...]
    routing: Routing
    deadline: float
    """In the event loop's time."""

    def block_hashes(self, seed: int) -> list[int]:
        """Of the prompt's full blocks."""
        return hash_blocks(self.prompt, self.model.card.format.block_size, self.model.root, seed)

    @property
    def most_tokens(self) -> int:
        """Length at which the answer ends whatever comes."""
        room = self.model.card.max_model_len - len(self.prompt)
        return room if self.sampling.max_tokens is None else min(self.sampling.max_tokens, room)

    def after(self, emitted: array[int]) -> Generation:
        """What is left to do once these tokens are out: they join the prompt, and the budgets shrink by them."""
        sampling, count = self.sampling, len(emitted)
        left = replace(
            sampling,
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - count,
            min_tokens=max(sampling.min_tokens - count, 0),
        )
        return replace(self, prompt=self.prompt + emitted, sampling=left)


def chat_prompt(model: ServedModel, messages: Sequence[dict[str, Any]], arguments: dict[str, Any]) -> str:
    """The messages as the model's template writes them. Raises `InvalidRequest`."""
    if model.template is None:
        raise Unsupported(f"the model {model.name} has no chat template; use /v1/completions", param="messages")
    return model.template.render(messages, arguments)


def make_generations(
    model: ServedModel,
    options: Options,
    prompts: Sequence[array[int]],
    *,
    request_id: str,
    trace_id: str,
    deadline: float,
    param: str,
) -> list[Generation]:
    """`options.n` answers a prompt, `param` being the prompt's name. Raises `InvalidRequest` where the model cannot."""
    card = model.card
    check_capabilities(options.sampling, options.routing.priority, card.name, card.capabilities)
    for token_id in options.sampling.stop_token_ids:
        if token_id >= card.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {token_id}; {card.name} has token ids below {card.vocab_size}",
                param="stop_token_ids",
            )
    for prompt in prompts:
        _check_prompt(card.name, card.max_model_len, card.vocab_size, prompt, options.sampling, param)
    several = len(prompts) * options.n > 1
    generations: list[Generation] = []
    for prompt in prompts:
        for choice in range(options.n):
            sampling = options.sampling
            if sampling.seed is not None and choice:
                # Equal seeds would make equal choices.
                sampling = replace(sampling, seed=(sampling.seed + choice + 2**63) % 2**64 - 2**63)
            generations.append(
                Generation(
                    request_id=f"{request_id}-{len(generations)}" if several else request_id,
                    trace_id=trace_id,
                    model=model,
                    prompt=prompt,
                    sampling=sampling,
                    stop=options.stop,
                    routing=options.routing,
                    deadline=deadline,
                )
            )
    return generations


def _check_prompt(
    model: str, longest: int, vocab_size: int, prompt: array[int], sampling: SamplingParams, param: str
) -> None:
    if not prompt:
        raise InvalidRequest(f"{param} has no tokens; it must have at least one", param=param)
    if max(prompt) >= vocab_size:
        raise InvalidRequest(f"{param} has a token id {max(prompt)}; {model} has ids below {vocab_size}", param=param)
    if len(prompt) >= longest:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {longest} tokens. However, your {param} has {len(prompt)} tokens, "
            "and at least one is needed for the answer. Please shorten it.",
            param=param,
        )
    answer = sampling.max_tokens or 0
    if len(prompt) + answer > longest:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {longest} tokens. However, you requested {len(prompt) + answer} "
            f"tokens ({len(prompt)} in the {param}, {answer} in the answer). Please reduce either.",
            param=param,
        )
