"""What our process can ask of a vLLM worker, through `AsyncLLM.collective_rpc`. Runs in the worker, between steps."""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group

from engines.vllm.config import Fault
from engines.vllm.connector import HandoffWorker

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's worker class, hence the prefix: a name that the worker has already is refused."""

    @property
    def _tokenmill(self) -> HandoffWorker:
        worker = get_kv_transfer_group().connector_worker
        assert isinstance(worker, HandoffWorker)
        return worker

    def tokenmill_kv_layout(self) -> str:
        """How a block lies in memory, in words."""
        return self._tokenmill.compat_format()

    def tokenmill_digest(self, block_ids: list[list[int]]) -> list[list[bytes]]:
        """Digests of held blocks, per KV cache group."""
        digests = self._tokenmill.digest(block_ids)
        if self._tokenmill.fault == "corrupt-block":
            self._tokenmill.spoil(block_ids)
        return digests

    def tokenmill_release(self, request_id: str) -> bool:
        """Lets go of held blocks; see `HandoffWorker.release`."""
        return self._tokenmill.release(request_id)

    def tokenmill_set_fault(self, fault: Fault) -> None:
        """For tests."""
        self._tokenmill.fault = fault
