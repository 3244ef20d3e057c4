"""What a worker says of itself each second: how busy it is, and a check on what others believe it holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One worker at one moment. The fields are those of kv.proto."""

    instance_id: str
    epoch: int
    last_seq: int
    """Number of the last event published; 0: none yet."""
    held_xor: int
    """XOR of the hashes held, each distinct (hash, tier) once."""
    held_blocks: int
    """Distinct (hash, tier) pairs held."""
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    kv_leased_blocks: int = 0
    step_time_us: int = 0
    steps: int = 0
