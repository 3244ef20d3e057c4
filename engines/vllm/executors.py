"""vLLM's executors in an engine core that watches us from its first moment: large models load for minutes."""

from __future__ import annotations

from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engines.vllm.internals import die_with_parent

__all__ = ["watched"]


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


def watched(executor: type[Executor]) -> type[Executor]:
    """The watching kind of the executor that vLLM has chosen; others (Ray) stay as they are."""
    return {MultiprocExecutor: WatchedMultiprocExecutor, UniProcExecutor: WatchedUniProcExecutor}.get(
        executor, executor
    )
