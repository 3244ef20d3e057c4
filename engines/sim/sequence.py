"""One request on its way through the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from enum import Enum, auto

from engines.base import FinishReason, KvOutcome, SamplingParams, Usage
from engines.sim.tokens import TokenSource

__all__ = ["Sequence", "Stage"]


class Stage(Enum):
    """Where a sequence is. It holds blocks in all stages but ENDED; in WAITING only after a read."""

    WAITING = auto()
    RUNNING = auto()
    READING = auto()
    """Its blocks are the destination of a transfer."""
    PREFILLED = auto()
    """All its prompt is computed, and that was all that was asked for."""
    ENDED = auto()


class Sequence:
    """Prompt, answer so far, and the blocks their KV lies in. The scheduler changes it; others read."""

    __slots__ = (
        "arrival", "blocks", "cached_tokens", "computed", "end_at", "handle_blocks", "hashes", "kv_outcome",
        "may_end", "min_end", "owner", "prefill_only", "priority", "prompt_tokens", "remote_tokens", "request_id",
        "source", "stage", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: array[int],
        hashes: list[int],
        sampling: SamplingParams,
        source: TokenSource,
        *,
        end_at: int,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        handle_blocks: int = 0,
        prefill_only: bool = False,
        owner: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = prompt
        self.prompt_tokens = len(prompt)
        self.hashes = hashes
        """Sequence hashes of the full blocks of `tokens`."""
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV lies in `blocks`."""
        self.source = source
        self.end_at = end_at
        """Length of prompt and answer at which it ends whatever comes."""
        self.min_end = len(prompt) + sampling.min_tokens
        """Length before which it does not end by a stop token."""
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.may_end = not sampling.ignore_eos
        """By the model's own end token."""
        self.priority = priority
        self.handle_blocks = handle_blocks
        """Blocks that another worker holds for it; 0 once it is decided what becomes of them."""
        self.prefill_only = prefill_only
        self.owner = owner
        """Whose it is; the scheduler does not look."""
        self.arrival = 0
        self.stage = Stage.WAITING
        self.cached_tokens: int | None = None
        """Of the prompt, found in the own prefix cache when it was first admitted; None before."""
        self.remote_tokens = 0
        self.kv_outcome = KvOutcome.NONE

    def __lt__(self, other: Sequence) -> bool:
        """Who runs first: higher priority, then who came first. Preempted or read, it keeps its place."""
        return (-self.priority, self.arrival) < (-other.priority, other.arrival)

    def next_token(self) -> FinishReason | None:
        """Appends the next token; says why the answer ends with it, if it does."""
        tokens = self.tokens
        ripe = len(tokens) >= self.min_end
        token = self.source.next(ripe and self.may_end, () if ripe else self.stop_ids)
        tokens.append(token)
        if ripe and token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.end_at else None

    @property
    def usage(self) -> Usage:
        """So far."""
        completion = len(self.tokens) - self.prompt_tokens
        return Usage(self.prompt_tokens, completion, self.cached_tokens or 0, self.remote_tokens)
