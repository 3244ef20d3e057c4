"""What a vLLM engine of ours can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fault", "VllmConfig"]

Fault = Literal["", "corrupt-block", "late-read"]
"""For tests. corrupt-block: as prefill, flip a byte of a held block after its digest was taken. late-read: as decode,
read a block only once its lease has ended."""


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Settings of one engine. `None` leaves the choice to vLLM, or to the adapter where its field says so."""

    model: str
    """Local directory or Hugging Face hub id."""
    served_model_name: str = ""
    """Empty: the last part of `model`."""
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    """Tokens. None: 32 on CPU (which takes multiples of 32 only), 16 elsewhere."""
    kv_cache_memory_mb: int | None = None
    """Memory for KV blocks. None: 512 on CPU, elsewhere what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_batched_tokens: int | None = None
    """Tokens of one step. None: 2,048."""
    tensor_parallel_size: int = 1
    lease_s: float = 120.0
    """How long KV that was computed for a reader is held, in whole seconds for vLLM (rounded up)."""
    read_timeout_s: float = 5.0
    """How long a read of KV may take before the prompt is computed here instead."""
    seed: int = 0
    enforce_eager: bool | None = None
    """None: yes on CPU (25 s to start instead of 90), no elsewhere."""
    cpu_threads: int = 1
    """OpenMP threads of the engine on CPU. More than its share of the cores slows all engines of a machine."""
    fault: Fault = ""
