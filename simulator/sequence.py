"""A request of a trace, as the sim engine's scheduler sees it: lengths and block hashes, no tokens. Pure."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from engines.base import FinishReason
from engines.sim.sequence import Sequence

__all__ = ["TraceSequence"]


class TraceSequence(Sequence):
    """Its answer's blocks get names of their own: a trace does not say which later prompt repeats an answer."""

    __slots__ = ("last_at_ps", "number", "remote")

    counted = True

    def __init__(
        self,
        number: int,
        prompt_tokens: int,
        output_tokens: int,
        hashes: list[int],
        *,
        handle_blocks: int = 0,
        prefill_only: bool = False,
        remote: bool = False,
    ) -> None:
        super().__init__(
            str(number),
            prompt_tokens,
            hashes,
            end_at=prompt_tokens + output_tokens,
            handle_blocks=handle_blocks,
            prefill_only=prefill_only,
        )
        self.number = number
        self.remote = remote
        """A prefill worker computed its prompt."""
        self.last_at_ps = 0
        """When its latest token came."""

    def next_token(self) -> FinishReason | None:
        """See `Sequence.next_token`."""
        self.length += 1
        return FinishReason.LENGTH if self.length >= self.end_at else None

    def hash_up_to(self, blocks: int) -> None:
        """See `Sequence.hash_up_to`."""
        hashes = self.hashes
        while len(hashes) < blocks:
            hashes.append(xxh3_64_intdigest(b"answer %d %d" % (self.number, len(hashes))))
