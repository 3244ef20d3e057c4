"""Making vLLM: our settings in its words. Importing this imports vLLM, which takes seconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import vllm
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from controlplane.errors import EngineFailed, SettingsError
from engines.base import Capability, EngineInfo, Role, SamplingParams
from engines.vllm.config import VllmConfig
from engines.vllm.executors import executor_class
from engines.vllm.internals import moved
from engines.vllm.steps import StepRecorder
from kvcache.format import KvFormat

__all__ = ["describe", "events_endpoints", "make_llm", "prefill_params", "sampling_params"]

_CPU_KV_CACHE_MB = 512
_CPU_BLOCK_SIZE = 32
_BLOCK_SIZE = 16
_MAX_BATCHED_TOKENS = 2048
_STALL_S, _CPU_STALL_S = 3.0, 15.0
"""See `EngineInfo.least_stall_s`. On busy processors a step takes many times as long as alone."""

_COMMON_CAPABILITIES = frozenset(
    {
        Capability.LOGPROBS,
        Capability.SEED,
        Capability.PENALTIES,
        Capability.MIN_TOKENS,
        Capability.PRIORITY,
        Capability.KV_EVENTS,
    }
)


def events_endpoints(directory: Path) -> tuple[str, str]:
    """Where the engine publishes its KV events, and where it replays them."""
    return f"ipc://{directory}/kv-events", f"ipc://{directory}/kv-replay"


def make_llm(
    config: VllmConfig, role: Role, model: Path, fingerprint: str, directory: Path, recorder: StepRecorder
) -> AsyncLLM:
    """Starts vLLM's processes and waits until the model is loaded. Blocks; must not run in an event loop's thread."""
    if problems := moved():
        raise SettingsError(
            f"vLLM {vllm.__version__} is not the one this adapter fits ({'; '.join(problems)}); "
            "install the version that pyproject.toml pins"
        )
    try:
        vllm_config = _engine_args(config, role, model, directory).create_engine_config()
    except ValueError as error:
        raise SettingsError(f"vLLM refuses these settings: {error}") from error
    # What the handshake compares: complete only now that vLLM has resolved "auto". Workers add the layout.
    transfer = vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config["kv_format"] = f"{fingerprint}|{_dtype(vllm_config)}|{vllm.__version__}"
    try:
        llm = AsyncLLM(
            vllm_config,
            executor_class=executor_class(vllm_config),
            log_stats=False,
            log_requests=False,
            stat_loggers=[lambda *_: recorder],
        )
    except Exception as error:
        raise EngineFailed(f"vLLM did not start: {error}") from error
    # It always adds its own Prometheus metrics, at some microseconds a token; ours are the host's.
    loggers = llm.logger_manager.stat_loggers
    loggers[:] = [logger for logger in loggers if not isinstance(logger, PrometheusStatLogger)]
    return llm


def _engine_args(config: VllmConfig, role: Role, model: Path, directory: Path) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    kv_cache_mb = config.kv_cache_memory_mb or (_CPU_KV_CACHE_MB if on_cpu else None)
    endpoint, replay_endpoint = events_endpoints(directory)
    return AsyncEngineArgs(
        model=str(model),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size or (_CPU_BLOCK_SIZE if on_cpu else _BLOCK_SIZE),
        kv_cache_memory_bytes=kv_cache_mb << 20 if kv_cache_mb else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_batched_tokens or _MAX_BATCHED_TOKENS,
        tensor_parallel_size=config.tensor_parallel_size,
        seed=config.seed,
        enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        scheduling_policy="priority",
        enable_logging_iteration_details=True,
        worker_extension_cls="engines.vllm.worker_extension.WorkerExtension",
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="engines.vllm.connector",
            kv_role="kv_producer" if role is Role.PREFILL else "kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kv_lease_duration": max(1, math.ceil(config.lease_s)),
                "read_timeout_s": config.read_timeout_s,
            },
        ),
    )


def _dtype(vllm_config: Any) -> str:
    """Of the KV cache, which follows the model unless told otherwise."""
    model, cache = str(vllm_config.model_config.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
    return model if cache == "auto" else f"{model}+{cache}"


async def describe(llm: AsyncLLM, config: VllmConfig, role: Role, model: Path, fingerprint: str) -> EngineInfo:
    """What has come of it all."""
    vllm_config = llm.vllm_config
    (layout, *_) = await llm.collective_rpc("tokenmill_kv_layout")
    eos = vllm_config.model_config.try_get_generation_config().get("eos_token_id", llm.renderer.get_eos_token_id())
    parallel = vllm_config.parallel_config
    own = Capability.HOLD_KV if role is Role.PREFILL else Capability.REMOTE_PREFILL
    return EngineInfo(
        model=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        tokenizer=str(model),
        format=KvFormat(
            model_fingerprint=fingerprint,
            dtype=_dtype(vllm_config),
            block_size=vllm_config.cache_config.block_size,
            layout=layout,
            engine="vllm",
            engine_version=vllm.__version__,
            parallel=f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}",
        ),
        total_blocks=vllm_config.cache_config.num_gpu_blocks,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        capabilities=_COMMON_CAPABILITIES | {own},
        least_stall_s=_CPU_STALL_S if current_platform.is_cpu() else _STALL_S,
    )


def sampling_params(sampling: SamplingParams, kv_transfer: dict[str, Any] | None) -> VllmSamplingParams:
    """Token ids only, as they come; with KV to read, if any."""
    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if kv_transfer is None else {"kv_transfer_params": kv_transfer},
    )


def prefill_params() -> VllmSamplingParams:
    """One token, which nobody wants, and the KV held after it."""
    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )
