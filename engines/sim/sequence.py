"""One request on its way through the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable
from enum import Enum, auto

from engines.base import FinishReason, KvOutcome, SamplingParams, Usage
from engines.sim.tokens import TokenSource
from kvcache.hashing import hash_block

__all__ = ["Sequence", "Stage", "TokenSequence"]


class Stage(Enum):
    """Where a sequence is. It holds blocks in all stages but ENDED; in WAITING only after a read."""

    WAITING = auto()
    RUNNING = auto()
    READING = auto()
    """Its blocks are the destination of a transfer."""
    PREFILLED = auto()
    """All its prompt is computed, and that was all that was asked for."""
    ENDED = auto()


class Sequence(ABC):
    """Prompt, answer so far, and the blocks their KV lies in. The scheduler changes it; others read.

    What its tokens are is the subclass's affair: the scheduler counts them, and asks for the next one.
    """

    counted = False
    """Its tokens are only counted, and it ends at `end_at`: many steps may be done at once."""

    __slots__ = (
        "arrival", "blocks", "cached_tokens", "computed", "end_at", "handle_blocks", "hashes", "kv_outcome", "length",
        "owner", "prefill_only", "priority", "prompt_tokens", "remote_tokens", "request_id", "stage",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        hashes: list[int],
        *,
        end_at: int,
        priority: int = 0,
        handle_blocks: int = 0,
        prefill_only: bool = False,
        owner: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.length = prompt_tokens
        """Tokens of prompt and answer so far."""
        self.hashes = hashes
        """Sequence hashes of the full blocks, of the prompt's at least."""
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV lies in `blocks`."""
        self.end_at = end_at
        """Length of prompt and answer at which it ends whatever comes."""
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

    @abstractmethod
    def next_token(self) -> FinishReason | None:
        """Appends the next token, `length` grows; says why the answer ends with it, if it does."""

    @abstractmethod
    def hash_up_to(self, blocks: int) -> None:
        """Sees to it that `hashes` has the first so many blocks, all of which are full."""

    @property
    def usage(self) -> Usage:
        """So far."""
        completion = self.length - self.prompt_tokens
        return Usage(self.prompt_tokens, completion, self.cached_tokens or 0, self.remote_tokens)


class TokenSequence(Sequence):
    """One with real tokens."""

    __slots__ = ("block_size", "hash_root", "hash_seed", "may_end", "min_end", "source", "stop_ids", "tokens")

    def __init__(
        self,
        request_id: str,
        prompt: array[int],
        hashes: list[int],
        sampling: SamplingParams,
        source: TokenSource,
        *,
        block_size: int,
        hash_root: int,
        hash_seed: int,
        end_at: int,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        handle_blocks: int = 0,
        prefill_only: bool = False,
        owner: Hashable = None,
    ) -> None:
        super().__init__(
            request_id,
            len(prompt),
            hashes,
            end_at=end_at,
            priority=priority,
            handle_blocks=handle_blocks,
            prefill_only=prefill_only,
            owner=owner,
        )
        self.tokens = prompt
        """Grows with the answer."""
        self.block_size = block_size
        self.hash_root = hash_root
        self.hash_seed = hash_seed
        self.source = source
        self.min_end = len(prompt) + sampling.min_tokens
        """Length before which it does not end by a stop token."""
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.may_end = not sampling.ignore_eos
        """By the model's own end token."""

    def next_token(self) -> FinishReason | None:
        """See `Sequence.next_token`."""
        ripe = self.length >= self.min_end
        token = self.source.next(ripe and self.may_end, () if ripe else self.stop_ids)
        self.tokens.append(token)
        self.length += 1
        if ripe and token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.end_at else None

    def hash_up_to(self, blocks: int) -> None:
        """See `Sequence.hash_up_to`."""
        hashes, size = self.hashes, self.block_size
        while len(hashes) < blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else self.hash_root
            hashes.append(hash_block(parent, self.tokens[start : start + size], self.hash_seed))
