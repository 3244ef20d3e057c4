"""The NixlConnector of our engines: KV hand-off whose blocks are leased, verified and never read late.

vLLM's own connector believes what it reads. This one adds, on the prefill side, release of blocks that nobody will
read and a lease that others can see; on the decode side, a refusal to read after the lease, a digest check of what
was read, and equality of everything that gives the bytes their meaning. What became of each read, and how each lease
ended, leaves the worker with its statistics. Runs inside vLLM's engine core and worker processes, and leans on the
internals that `internals.py` names.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from engines.base import KvOutcome
from engines.vllm.config import Fault
from engines.vllm.internals import die_with_parent, patient_progress_thread, unpinned_threads

__all__ = ["DIGEST_BYTES", "HandoffWorker", "NixlConnector"]

DIGEST_BYTES = 16
"""Of xxh3_128: against bad memory, wrong blocks and reuse, not against an adversary, who could write KV himself."""

_PROBE_TIMEOUT_S = 1.0
"""For a TCP connection to the prefill side. vLLM's handshake alone waits 5 s for a peer that is not there."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """What vLLM instantiates, once in the scheduler's process and once in each worker.

    The name matters: vLLM compares it with "NixlConnector" to choose the KV layout and more.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not NixlPullConnector's, which would make vLLM's own scheduler and worker.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandoffScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            die_with_parent()  # which is the engine core
            self.connector_worker = HandoffWorker(vllm_config, self.engine_id, kv_cache_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Called where statistics of several workers are put together."""
        return HandoffStats() if data is None else HandoffStats(data=data)


class HandoffScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Tells the reader when the lease ends, and the worker which digests to expect."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Exports the lease's end, on this process's clock: the handshake tells the reader how far apart clocks are."""
        hold, params = super().request_finished(request, block_ids)
        if hold and params is not None and params["do_remote_prefill"]:
            params["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
        return hold, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Adds what `ReqMeta` has no field for."""
        params = {req_id: entry[0].kv_transfer_params for req_id, entry in self._reqs_need_recv.items()}
        meta = super().build_connector_meta(scheduler_output)
        for req_id, req_meta in meta.reqs_to_recv.items():
            req_meta.digests = params[req_id].get("digests", ())
        return meta


@dataclass
class HandoffStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's transfer statistics, and ours: the only way from a worker to our process that every step takes anyway."""

    def reset(self) -> None:
        """Empties all lists. Must stay serialisable."""
        super().reset()
        self.data["handoffs"] = []
        """[request id, KvOutcome's value, blocks read] per read, from each worker of the reader."""
        self.data["leases_ended"] = []
        """[request id, whether it expired] per lease, from each worker of the holder."""
        self.data["overdue"] = []
        """Request ids of reads that take too long, from each worker of the reader."""

    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return super().is_empty() and not any(self.data[name] for name in ("handoffs", "leases_ended", "overdue"))


class IncompatibleKv(RuntimeError):
    """The other side's bytes mean something else than ours would."""


class HandoffWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Moves and judges the bytes. All methods but the handshake's run on the worker's main thread, between steps."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        with ExitStack() as traps:
            traps.enter_context(patient_progress_thread())
            traps.enter_context(unpinned_threads())
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = HandoffStats()
        self.fault: Fault = ""
        self._format: str = self.kv_transfer_config.get_from_extra_config("kv_format", "")
        self._released: set[str] = set()
        self._expired: set[str] = set()
        self._verdicts: dict[str, KvOutcome] = {}
        """Why a read that must count as failed is one, until it is reported."""
        self._incompatible: set[str] = set()
        """Engines whose handshake was refused. Written by the handshake's thread."""
        self._read_timeout_s: float = self.kv_transfer_config.get_from_extra_config("read_timeout_s", 5.0)
        self._due: dict[str, float] = {}
        """When a read under way should have ended. One that is overdue goes on, for nothing can end it."""
        self._delayed: list[tuple[str, ReqMeta]] = []
        """Reads that the fault "late-read" keeps until their lease is over."""

    # Who may talk to whom

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Puts our own idea of compatibility in place of vLLM's.

        Theirs hashes the model's path, which differs between machines, and leaves out block size, weights and
        layout, which must not.
        """
        super().register_kv_caches(kv_caches)
        identity = "|".join((self._format, self.compat_format(), self._TRANSFER_MODE))
        self.compat_hash = xxhash.xxh3_128_hexdigest(identity.encode())
        self.xfer_handshake_metadata.compatibility_hash = self.compat_hash

    def compat_format(self) -> str:
        """How a block lies in this worker's memory, in words. Equal words, equal meaning of the bytes."""
        return (
            f"{self.backend_name}-{self.kv_cache_layout}-{self.kv_buffer_device}"
            f"-{self.block_size}x{self._physical_blocks_per_logical_kv_block}"
        )

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
        try:
            return super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, IncompatibleKv) or "compatibility hash mismatch" in str(error):
                self._incompatible.add(expected_engine_id)
            raise

    def _validate_remote_agent_handshake(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_size: int, remote_dcp_size: int = 1
    ) -> None:
        ours = (self.block_size, self.kv_cache_layout, self.backend_name, self.transfer_tp_size, self.dcp_size)
        theirs = (
            nixl_agent_meta.block_size,
            nixl_agent_meta.kv_cache_layout,
            nixl_agent_meta.attn_backend_name,
            remote_tp_size,
            remote_dcp_size,
        )
        if ours != theirs:
            names = ("block_size", "kv_cache_layout", "attention backend", "tensor parallel size", "DCP size")
            wrong = [f"{n} {a} != {b}" for n, a, b in zip(names, ours, theirs, strict=True) if a != b]
            raise IncompatibleKv(f"KV of engine {nixl_agent_meta.engine_id} is not ours: {', '.join(wrong)}")
        super()._validate_remote_agent_handshake(nixl_agent_meta, remote_tp_size, remote_dcp_size)

    # Reading

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if meta.awaiting_kvs:
            if self._lease_left_s(meta) <= 0:
                self._verdicts[req_id] = KvOutcome.LATE
                self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
                return
            if self.fault == "late-read" and meta.remote.engine_id in self._engine_clock_offset:
                self._delayed.append((req_id, meta))
                return
            self._due[req_id] = time.perf_counter() + self._read_timeout_s
        super()._read_blocks_for_req(req_id, meta)

    def _lease_left_s(self, meta: ReqMeta) -> float:
        """By the holder's clock. Unknown counts as endless before the handshake, which is when nothing is read yet."""
        with self._handshake_lock:
            offset = self._engine_clock_offset.get(meta.remote.engine_id)
        ends = meta.remote.blocks_expiry_time
        return float("inf") if offset is None or ends is None else ends - offset - time.perf_counter()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in done - failed - self._recv_failures:
            meta = self._recving_metadata[req_id]
            if self._lease_left_s(meta) <= 0:
                self._verdicts[req_id] = KvOutcome.LATE
            elif not self._as_digested(meta):
                self._verdicts[req_id] = KvOutcome.CORRUPT
            else:
                continue
            failed.add(req_id)
        return done, failed

    def _as_digested(self, meta: ReqMeta) -> bool:
        """Whether what lies here now is what the holder digested. Reads take the tail of what is held."""
        rank = slice(self.transfer_tp_rank * DIGEST_BYTES, (self.transfer_tp_rank + 1) * DIGEST_BYTES)
        return len(meta.digests) == len(meta.local_block_ids) and all(
            len(theirs) >= len(ours) and [digest[rank] for digest in theirs[len(theirs) - len(ours) :]] == ours
            for theirs, ours in zip(meta.digests, self.digest(meta.local_block_ids), strict=True)
        )

    def digest(self, block_ids: list[list[int]]) -> list[list[bytes]]:
        """One digest a block, over all its layers, for the blocks of each KV cache group."""
        caches = self.host_xfer_buffers if self.use_host_buffer else self.device_kv_caches
        digests: list[list[bytes]] = []
        kernel_block_ids = self._logical_to_kernel_block_ids(block_ids, self._physical_blocks_per_logical_kv_block)
        for group, logical, physical in zip(
            self.kv_cache_config.transfer_groups, block_ids, kernel_block_ids, strict=True
        ):
            hashers = [xxhash.xxh3_128() for _ in logical]
            for name in group.layer_names:
                cache = caches.get(name, ())
                for tensor in cache if isinstance(cache, tuple | list) else (cache,):
                    rows = _rows(tensor, physical)
                    for index, row in enumerate(rows):
                        hashers[index * len(logical) // len(rows)].update(row)
            digests.append([hasher.digest() for hasher in hashers])
        return digests

    # Holding

    def spoil(self, block_ids: list[list[int]]) -> None:
        """For tests: spoils the last held block. It must be a partly filled one, which no other request shares."""
        block = next(iter(self.device_kv_caches.values()))[block_ids[0][-1]]
        block[(0,) * block.dim()] += 1

    def release(self, req_id: str) -> bool:
        """Lets go of held blocks in the next step. The request must be over. False: they were gone already."""
        held = req_id in self._reqs_to_process and req_id not in self._released
        if held:
            self._released.add(req_id)
        return held

    def _get_new_notifs(self) -> set[str]:
        freed: set[str] = super()._get_new_notifs()
        for req_id in self._released & self._reqs_to_process:
            self._reqs_to_process.remove(req_id)
            self._reqs_to_send.pop(req_id, None)
            self.consumer_notification_counts_by_req.pop(req_id, None)
            self.expected_consumer_notifications_by_req.pop(req_id, None)
            freed.add(req_id)
        self._released.clear()
        return freed

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        self._expired = done_sending - before

    # Reporting

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Called once a step. Notes what became of each read and each lease."""
        self._read_delayed()
        reading = dict(self._recving_metadata)
        results = super().get_transfer_results()
        for req_id in results.finished_recving:
            self._due.pop(req_id, None)
            meta = reading[req_id]
            outcome = KvOutcome.READ
            if req_id in results.failed_recving:
                unknown = (
                    KvOutcome.INCOMPATIBLE if meta.remote.engine_id in self._incompatible else KvOutcome.UNREACHABLE
                )
                outcome = self._verdicts.pop(req_id, unknown)
            blocks = max(map(len, meta.local_block_ids), default=0)
            self.xfer_stats.data["handoffs"].append([req_id, outcome.value, blocks])
        for req_id in results.finished_sending:
            self.xfer_stats.data["leases_ended"].append([req_id, req_id in self._expired])
        now = time.perf_counter()
        for req_id in [req_id for req_id, due in self._due.items() if due < now]:
            del self._due[req_id]
            self.xfer_stats.data["overdue"].append(req_id)
        return results

    def _read_delayed(self) -> None:
        delayed, self._delayed = self._delayed, []
        for req_id, meta in delayed:
            if self._lease_left_s(meta) > 0:
                self._delayed.append((req_id, meta))
            else:
                super()._read_blocks_for_req(req_id, meta)


def _rows(cache: torch.Tensor, block_ids: list[int]) -> Any:
    """The bytes of these blocks, a row each, in our memory."""
    chosen = cache.index_select(0, torch.tensor(block_ids, dtype=torch.int64, device=cache.device))
    return chosen.cpu().flatten(1).view(torch.uint8).numpy()
