"""What a worker's engine is told: the [engine] section.

None leaves a choice to the engine. A setting that the chosen engine does not have is refused by `engines.create`.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting

__all__ = ["EngineSettings"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine, whichever it is. Fields named sim_* are the simulated engine's only."""

    engine: str = setting("vllm", "inference engine", choices=("vllm", "sim"))
    model: str = setting("", "model directory or hub id; sim needs none")
    served_model_name: str = setting("", "name clients ask for; default: the last part of model")
    dtype: str | None = setting(None, "type of weights and KV cache, e.g. float32 or bfloat16")
    max_model_len: int | None = setting(None, "most tokens of prompt and answer together", minimum=2)
    block_size: int | None = setting(None, "tokens a KV block", minimum=1)
    kv_cache_memory_mb: int | None = setting(None, "memory for KV blocks, MiB", minimum=1)
    gpu_memory_utilization: float | None = setting(None, "part of a GPU's memory to use", minimum=0.01, maximum=1)
    tensor_parallel_size: int | None = setting(None, "GPUs that share each layer", minimum=1)
    cpu_threads: int | None = setting(None, "threads of an engine that runs on the CPU", minimum=1)
    max_num_seqs: int | None = setting(None, "most requests in one step", minimum=1)
    max_batched_tokens: int | None = setting(None, "most tokens computed in one step", minimum=1)
    kv_lease_s: float = setting(
        120.0, "how long prefilled KV is held for its reader, seconds", minimum=0.001, maximum=1_000_000
    )
    kv_read_timeout_s: float = setting(
        5.0,
        "longest wait for KV that is being read before the prompt is computed instead, seconds",
        minimum=0.001,
        maximum=1_000_000,
    )
    seed: int = setting(0, "seed of the engine's own randomness", minimum=0)
    sim_time_scale: float | None = setting(
        None, "times faster than real; 0: no waiting at all", minimum=0, flag="--time-scale"
    )
    sim_profile: str | None = setting(None, "timing profile: a name, or the path of a .toml")
    sim_total_blocks: int | None = setting(None, "KV blocks in all", minimum=1)
    sim_kv_bytes_per_block: int | None = setting(
        None, "real bytes behind each KV block; 0: none, no transfer", minimum=0
    )
    sim_answer_tokens: int | None = setting(
        None, "mean length of an answer without max_tokens; 0: the model's length", minimum=0
    )
    fault: str = setting(
        "", "misbehaves so, for tests", choices=("", "corrupt-block", "late-read", "hang"), hidden=True
    )
