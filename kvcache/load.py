"""What a worker says of itself each second: how busy it is, and a check on what others believe it holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KvCheck", "LoadReport"]


@dataclass(frozen=True, slots=True)
class KvCheck:
    """What others can check their picture of one data-parallel rank against."""

    dp_rank: int
    last_seq: int
    """Number of the last event published; 0: none yet."""
    held_xor: int
    """XOR of the hashes held, each distinct (hash, tier) once."""
    held_blocks: int
    """Distinct (hash, tier) pairs held."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One worker at one moment. The fields are those of kv.proto; the check among them is rank 0's."""

    instance_id: str
    epoch: int
    last_seq: int
    held_xor: int
    held_blocks: int
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    kv_leased_blocks: int = 0
    step_time_us: int = 0
    steps: int = 0
    other_ranks: tuple[KvCheck, ...] = ()

    @property
    def checks(self) -> tuple[KvCheck, ...]:
        """Those of all ranks."""
        return KvCheck(0, self.last_seq, self.held_xor, self.held_blocks), *self.other_ranks
