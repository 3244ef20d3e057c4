"""What we lean on inside vLLM and NIXL beyond their public interfaces, and the check that it is still there.

Imported in our process, in vLLM's engine core and in its workers.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

__all__ = ["PROGRESS_DELAY_US", "die_with_parent", "moved", "patient_progress_thread", "unpinned_threads"]

PROGRESS_DELAY_US = 1000
"""Between two polls of NIXL's progress thread. Its Python interface says 0, with which an idle worker burns a core."""

_WATCH = "tokenmill-parent-watch"

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

_SIGNATURES = {
    f"{_NIXL}.base_worker:NixlBaseConnectorWorker": {
        "__init__": "self, vllm_config, engine_id, kv_cache_config",
        "_nixl_handshake": (
            "self, host, port, remote_tp_size, expected_engine_id, remote_dcp_size, remote_pp_size, notif_agents_only"
        ),
        "_validate_remote_agent_handshake": "self, nixl_agent_meta, remote_tp_size, remote_dcp_size",
        "_pop_done_transfers": "self, transfers",
        "_handle_failed_transfer": "self, req_id, handle, failed_req_ids, record_failed_transfer",
        "_reap_expired_send_leases": "self, done_sending",
        "_logical_to_kernel_block_ids": "self, block_ids, ratio",
        "get_transfer_results": "self",
        "register_kv_caches": "self, kv_caches",
    },
    f"{_NIXL}.pull_worker:NixlPullConnectorWorker": {
        "_read_blocks_for_req": "self, req_id, meta",
        "_get_new_notifs": "self",
    },
    f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler": {
        "request_finished": "self, request, block_ids",
        "build_connector_meta": "self, scheduler_output",
    },
    "vllm.v1.engine.output_processor:OutputProcessor": {
        "add_request": "self, request, prompt, parent_req, request_index, queue",
        "abort_requests": "self, request_ids, internal",
        "get_num_queued_tokens": "self",
    },
    "vllm.v1.engine.input_processor:InputProcessor": {
        "assign_request_id": "request",
    },
    "vllm.v1.engine.core_client:AsyncMPClient": {
        "add_request_async": "self, request",
        "abort_requests_async": "self, request_ids",
    },
    "vllm.v1.metrics.loggers:StatLoggerBase": {
        "record": "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx",
    },
}
"""Class: method: names of its parameters. What we override or call without vLLM promising it."""

_WORKER_STATE = (
    "_engine_clock_offset",
    "_handshake_lock",
    "_physical_blocks_per_logical_kv_block",
    "_recv_failures",
    "_recving_metadata",
    "_reqs_to_process",
    "_reqs_to_send",
    "backend_name",
    "block_size",
    "compat_hash",
    "consumer_notification_counts_by_req",
    "dcp_size",
    "device_kv_caches",
    "expected_consumer_notifications_by_req",
    "host_xfer_buffers",
    "kv_buffer_device",
    "kv_cache_layout",
    "transfer_tp_rank",
    "transfer_tp_size",
    "use_host_buffer",
    "xfer_handshake_metadata",
    "xfer_stats",
)
"""Attributes of vLLM's connector worker that ours reads or writes."""


def moved() -> list[str]:
    """What the installed vLLM has changed of all this, a sentence part each; empty when the adapter fits it."""
    problems = []
    for place, methods in _SIGNATURES.items():
        module, _, name = place.partition(":")
        try:
            cls = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            problems.append(f"{place} is gone")
            continue
        for method, expected in methods.items():
            if not hasattr(cls, method):
                problems.append(f"{name}.{method} is gone")
            elif (found := ", ".join(inspect.signature(getattr(cls, method)).parameters)) != expected:
                problems.append(f"{name}.{method} takes ({found}), not ({expected})")
    source = inspect.getsource(import_module(f"{_NIXL}.base_worker"))
    problems += [f"NixlBaseConnectorWorker.{name} is gone" for name in _WORKER_STATE if f"self.{name}" not in source]
    return problems


def die_with_parent() -> None:
    """Ends this process at once when the one that made it is gone, however that ended, and only then.

    Nothing in vLLM watches us: after a kill -9 its core would serve nobody for ever. (PR_SET_PDEATHSIG would not do:
    it fires when the parent's *thread* ends.) A Ctrl-C in the terminal, on the other hand, is for us alone: it
    begins a drain, for which the engine must live.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return
    os.setpgrp()

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


@contextmanager
def patient_progress_thread() -> Iterator[None]:
    """Within, NIXL agents are made with a progress thread that waits between polls."""
    from vllm.distributed.nixl_utils import NixlWrapper

    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    make = bindings.nixlAgent

    def make_patient(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make(name, config)

    bindings.nixlAgent = make_patient
    try:
        yield
    finally:
        bindings.nixlAgent = make


@contextmanager
def unpinned_threads() -> Iterator[None]:
    """Within, vLLM's connector finds no core to pin its worker's main thread to: it would take the last, in every
    worker of the machine."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not hasattr(platform, "discover_numa_topology"):
        yield
        return
    original = platform.__dict__["discover_numa_topology"]
    platform.discover_numa_topology = classmethod(lambda cls: [])
    try:
        yield
    finally:
        platform.discover_numa_topology = original
