"""vLLM's executors in an engine core that watches us from its first moment: large models load for minutes."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engines.vllm.internals import die_with_parent

__all__ = ["executor_class"]


class WatchedMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Workers in processes of their own."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class WatchedUniProcExecutor(UniProcExecutor):  # type: ignore[misc]
    """The one worker in the engine core's process."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


def executor_class(vllm_config: VllmConfig) -> type[Executor]:
    """What runs the worker or workers: of vLLM's choice, but watching us. Others than these two (Ray) stay as they are.

    On CPU vLLM gives even a single worker a process, to pin its threads there. Ours are not pinned (see `environment`):
    in the engine core it starts in two thirds of the CPU time, and a step takes no detour.
    """
    chosen = Executor.get_class(vllm_config)
    if current_platform.is_cpu() and vllm_config.parallel_config.world_size == 1:
        chosen = UniProcExecutor
    watching = {MultiprocExecutor: WatchedMultiprocExecutor, UniProcExecutor: WatchedUniProcExecutor}
    executor: type[Executor] = watching.get(chosen, chosen)
    return executor
