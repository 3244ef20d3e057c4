"""vLLM behind the engine interface."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import shutil
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from controlplane.errors import EngineFailed, InvalidRequest, TokenmillError, Unsupported
from engines.base import (
    EngineInfo,
    EngineRequest,
    Handle,
    KvEventSink,
    KvOutcome,
    LoadSnapshot,
    PrefillResult,
    Role,
    StepSink,
)
from engines.vllm import environment
from engines.vllm.config import Fault, VllmConfig
from engines.vllm.fingerprint import fingerprint, locate

if TYPE_CHECKING:
    # vLLM takes seconds to import and reads the environment then: `start` imports it, in a thread.
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.tasks import SupportedTask
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from engines.vllm.kv_events import KvEventReader
    from engines.vllm.steps import HeldPrefill, RunningRequest, StepRecorder

__all__ = ["VllmEngine"]

_STOP_TIMEOUT_S = 3.0
"""Until vLLM's processes are killed. Left alone they take NIXL and torch down piece by piece, in about 5 s: the kernel
does as well, and by then no request is left."""
_END_TIMEOUT_S = 2.0
_POLL_S = 0.1


class VllmEngine:
    """One vLLM engine in one role, in processes of its own. Implements `engines.base.Engine`.

    Sets environment variables of this process; see `environment`.
    """

    def __init__(
        self, config: VllmConfig, role: Role, instance_id: str, hash_seed: int, advertise_host: str = "127.0.0.1"
    ) -> None:
        self._config = config
        self._role = role
        self._instance_id = instance_id
        self._hash_seed = hash_seed
        self._advertise_host = advertise_host
        self._info: EngineInfo | None = None
        self._llm: AsyncLLM | None = None
        self._making: asyncio.Future[AsyncLLM] | None = None
        self._strangers: set[multiprocessing.process.BaseProcess] = set()
        """Children of our process that are none of this engine's."""
        self._processes: list[psutil.Process] = []
        self._recorder: StepRecorder | None = None
        self._events: KvEventReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._directory: Path | None = None
        self._directory_lock = -1
        self._side_channel: socket.socket | None = None
        self._running: dict[str, RunningRequest | HeldPrefill] = {}
        """By our request id."""
        self._generating: dict[str, RunningRequest] = {}
        """By vLLM's request id."""
        self._supported_tasks: tuple[SupportedTask, ...] = ()
        self._for_core: asyncio.Queue[str | EngineCoreRequest] = asyncio.Queue()
        """What vLLM's core is still to be told, in this order: ids to forget, and requests begun again."""
        self._leases: dict[str, int] = {}
        """Blocks held for a reader, by handle."""
        self._leases_expired = 0

    # Life

    async def start(self, on_kv_events: KvEventSink, on_progress: Callable[[str], None]) -> EngineInfo:
        """See `Engine.start`. About 25 s on CPU, most of it imports in two processes."""
        try:
            return await self._start(on_kv_events, on_progress)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, on_kv_events: KvEventSink, on_progress: Callable[[str], None]) -> EngineInfo:
        on_progress("looking for the model")
        model = await asyncio.to_thread(locate, self._config.model)
        on_progress("reading the weights' fingerprint")
        identity = await asyncio.to_thread(fingerprint, model)
        address = environment.resolve(self._advertise_host)
        self._directory, self._directory_lock = environment.socket_folder()
        self._side_channel = environment.reserve_port(address)
        environment.apply(self._config, address, self._side_channel.getsockname()[1], self._directory)
        on_progress("importing vLLM")
        launch = await asyncio.to_thread(import_module, "engines.vllm.launch")
        from engines.vllm.kv_events import KvEventReader, Translator
        from engines.vllm.steps import StepRecorder

        on_progress("loading the weights and making the KV cache")
        self._recorder = StepRecorder(self._on_handoff, self._on_overdue, self._on_lease_end)
        self._strangers = set(multiprocessing.active_children())
        self._making = asyncio.ensure_future(
            asyncio.to_thread(
                launch.make_llm, self._config, self._role, model, identity, self._directory, self._recorder
            )
        )
        self._llm = llm = await asyncio.shield(self._making)
        self._processes = self._find_processes()
        llm._run_output_handler()
        info: EngineInfo = await launch.describe(llm, self._config, self._role, model, identity)
        self._info = info
        self._supported_tasks = await llm.get_supported_tasks()
        endpoint, replay_endpoint = launch.events_endpoints(self._directory)
        self._events = KvEventReader(
            endpoint,
            replay_endpoint,
            Translator(identity, info.format.block_size, self._hash_seed),
            on_kv_events,
            llm.reset_prefix_cache,
        )
        self._tasks = [
            asyncio.create_task(self._events.run(), name="vllm-kv-events"),
            asyncio.create_task(self._tell_core(), name="vllm-aborts"),
        ]
        if self._config.fault:
            await self.inject_fault(self._config.fault)
        return info

    async def stop(self) -> None:
        """See `Engine.stop`. Running requests end with CANCELLED."""
        for request_id in list(self._running):
            self.abort(request_id)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._making is not None:
            await self._stop_processes(self._making)
            self._making = self._llm = None
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._side_channel is not None:
            self._side_channel.close()
            self._side_channel = None
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            os.close(self._directory_lock)
            self._directory = None

    async def _stop_processes(self, making: asyncio.Future[AsyncLLM]) -> None:
        while not making.done():
            # The thread that makes it cannot be interrupted; it gives up when its processes are gone. They would first
            # finish loading if asked kindly.
            _kill(self._find_processes())
            await asyncio.wait([making], timeout=_POLL_S)
        with suppress(TokenmillError):
            llm = await making
            await asyncio.to_thread(llm.shutdown, _STOP_TIMEOUT_S)
        multiprocessing.active_children()  # takes leave of those that have ended
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, _END_TIMEOUT_S)
        _kill(alive)

    def _find_processes(self) -> list[psutil.Process]:
        """vLLM's engine core and what came of it. Right while no other engine starts in this process."""
        found = []
        for child in set(multiprocessing.active_children()) - self._strangers:
            with suppress(psutil.NoSuchProcess):
                core = psutil.Process(child.pid)
                found += [core, *core.children(recursive=True)]
        return found

    def failed(self) -> str | None:
        """See `Engine.failed`."""
        if self._llm is None:
            return None
        if self._llm.errored:
            return "vLLM's engine core has ended; its log says why"
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return f"{task.get_name()} failed: {error}"
        return None

    # Requests

    async def generate(self, request: EngineRequest, sink: StepSink) -> None:
        """See `Engine.generate`."""
        from engines.vllm.launch import sampling_params
        from engines.vllm.steps import RunningRequest

        recorder = self._recorder
        assert recorder is not None
        running = RunningRequest(request, sink, recorder, self._on_end)
        kv_transfer = None
        if request.kv is not None:
            running.kv_outcome, kv_transfer = self._kv_transfer(request.kv, request.prompt_token_ids)
        self._generating[running.internal_id] = running
        try:
            await self._admit(request, sampling_params(request.sampling, kv_transfer), running)
        except BaseException:
            self._generating.pop(running.internal_id, None)
            raise

    def _kv_transfer(self, kv: Handle, prompt: Sequence[int]) -> tuple[KvOutcome, dict[str, Any] | None]:
        """What vLLM needs to read the handle's blocks, and the outcome to assume until the worker reports another."""
        assert self._info is not None
        if self._role is not Role.DECODE or self._info.format.differences(kv.format):
            return KvOutcome.INCOMPATIBLE, None
        try:
            params: dict[str, Any] = msgspec.msgpack.decode(kv.engine_params)
            groups: list[list[int]] = params["remote_block_ids"]
            # Digests prove that the blocks arrived as they were, not that they are this prompt's.
            if sum(map(len, groups)) != len(kv.digests) or params.pop("prompt") != _identity(prompt):
                return KvOutcome.CORRUPT, None
        except (msgspec.DecodeError, KeyError, TypeError):
            return KvOutcome.CORRUPT, None
        digests = iter(kv.digests)
        params["digests"] = [list(islice(digests, len(group))) for group in groups]
        return KvOutcome.LOCAL, params

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        """See `Engine.prefill`."""
        from engines.vllm.launch import prefill_params
        from engines.vllm.steps import HeldPrefill

        if self._role is not Role.PREFILL:
            raise Unsupported(f"{self._instance_id} runs in the {self._role} role and holds no KV for others")
        held = HeldPrefill(request, self._on_held, self._on_end)
        try:
            await self._admit(request, prefill_params(), held)
            params = await held.result
            blocks: list[list[int]] = params["remote_block_ids"]
            ranks = await self._rpc("tokenmill_digest", blocks)
        except BaseException:
            self._drop(held)
            raise
        digests = [b"".join(shards) for groups in zip(*ranks, strict=True) for shards in zip(*groups, strict=True)]
        return PrefillResult(
            handle_id=held.internal_id,
            tokens=params["remote_num_tokens"],
            cached_tokens=held.cached_tokens,
            engine_params=msgspec.msgpack.encode(params | {"prompt": _identity(request.prompt_token_ids)}),
            digests=tuple(digests),
            # Set by the engine core; processes of one machine share the clock.
            lease_s=max(0.0, params["remote_blocks_expiry_time"] - time.perf_counter()),
        )

    async def _admit(
        self, request: EngineRequest, params: VllmSamplingParams, queue: RunningRequest | HeldPrefill
    ) -> None:
        llm = self._llm
        if llm is None or llm.errored:
            raise EngineFailed("the engine is not running")
        if request.request_id in self._running:
            raise InvalidRequest("request_id: a request of this id is running already", param="request_id")
        core_request = self._register(llm, request, params, queue)
        try:
            await llm.engine_core.add_request_async(core_request)
        except BaseException:
            self._drop(queue)
            raise

    def _register(
        self, llm: AsyncLLM, request: EngineRequest, params: VllmSamplingParams, queue: RunningRequest | HeldPrefill
    ) -> EngineCoreRequest:
        """Makes vLLM's output go to `queue`; its core is still to be told of the request."""
        from vllm.exceptions import VLLMClientError

        try:
            core_request: EngineCoreRequest = llm.input_processor.process_inputs(
                queue.internal_id,
                {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)},
                params,
                supported_tasks=self._supported_tasks,
                priority=-request.priority,  # vLLM runs the lowest first
            )
        except (ValueError, VLLMClientError) as error:
            raise InvalidRequest(str(error)) from error
        core_request.external_req_id = core_request.request_id
        self._running[request.request_id] = queue
        llm.output_processor.add_request(core_request, None, None, 0, queue)
        return core_request

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        running = self._running.get(request_id)
        if running is None:
            return False
        self._drop(running)
        return True

    def _drop(self, queue: RunningRequest | HeldPrefill) -> None:
        """Forgets a request here and now, with an end for its sink; vLLM's core is told as soon as may be."""
        if self._llm is None or self._recorder is None:
            return
        self._llm.output_processor.abort_requests([queue.internal_id], internal=True)
        self._recorder.flush_soon()
        self._leases.pop(queue.internal_id, None)
        self._for_core.put_nowait(queue.internal_id)

    async def _tell_core(self) -> None:
        assert self._llm is not None
        core = self._llm.engine_core
        while True:
            waiting = [await self._for_core.get()]
            while not self._for_core.empty():
                waiting.append(self._for_core.get_nowait())
            if self._llm.errored:
                continue
            for forget, those in groupby(waiting, key=lambda one: isinstance(one, str)):
                if forget:
                    await self._forget([one for one in those if isinstance(one, str)])
                else:
                    for request in those:
                        await core.add_request_async(request)

    async def _forget(self, internal_ids: list[str]) -> None:
        assert self._llm is not None
        await self._llm.engine_core.abort_requests_async(internal_ids)
        if self._role is Role.PREFILL:
            # What had finished before the abort came is held now, and nobody knows of it.
            for internal_id in internal_ids:
                await self._rpc("tokenmill_release", internal_id)

    async def release(self, handle_id: str) -> bool:
        """See `Engine.release`."""
        if self._leases.pop(handle_id, None) is None:
            return False
        return any(await self._rpc("tokenmill_release", handle_id))

    async def inject_fault(self, fault: Fault) -> None:
        """For tests: go wrong in this way from now on; empty ends it."""
        await self._rpc("tokenmill_set_fault", fault)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Asks every worker, between two of its steps."""
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._llm
        if llm is None or llm.errored:
            raise EngineFailed("the engine is not running")
        try:
            return list(await llm.collective_rpc(method, args=args))
        except EngineDeadError as error:
            raise EngineFailed("vLLM's engine core has ended") from error

    # What vLLM reports, step by step

    def _on_handoff(self, internal_id: str, outcome: KvOutcome, blocks: int) -> None:
        """A worker has read KV, or failed to. Comes in a step before the request's first token."""
        running = self._generating.get(internal_id)
        if running is not None and self._info is not None:
            running.handed_off(outcome, blocks, self._info.format.block_size)

    def _on_overdue(self, internal_id: str) -> None:
        """A read takes too long: its peer may have stopped. The prompt is computed here, in other blocks.

        Those it was to be read into stay out of use until NIXL has done with them: bytes may still come. vLLM sees to
        that for a request that is aborted while it is read for.
        """
        from engines.vllm.launch import sampling_params

        llm, running = self._llm, self._generating.pop(internal_id, None)
        if llm is None or running is None:
            return
        self._for_core.put_nowait(running.begin_again())
        llm.output_processor.abort_requests([internal_id], internal=True)
        self._generating[running.internal_id] = running
        params = sampling_params(running.request.sampling, None)
        self._for_core.put_nowait(self._register(llm, running.request, params, running))

    def _on_held(self, held: HeldPrefill, blocks: int) -> None:
        self._leases[held.internal_id] = blocks

    def _on_lease_end(self, internal_id: str, expired: bool) -> None:
        if self._leases.pop(internal_id, None) is not None and expired:
            self._leases_expired += 1

    def _on_end(self, queue: RunningRequest | HeldPrefill) -> None:
        self._running.pop(queue.request_id, None)
        self._generating.pop(queue.internal_id, None)

    # Load and cache

    def load(self) -> LoadSnapshot:
        """See `Engine.load`."""
        llm, recorder, info = self._llm, self._recorder, self._info
        if llm is None or recorder is None or info is None:
            return LoadSnapshot()
        return LoadSnapshot(
            running_requests=recorder.running,
            waiting_requests=recorder.waiting,
            queued_prefill_tokens=llm.output_processor.get_num_queued_tokens(),
            kv_used_blocks=round(recorder.kv_usage * info.total_blocks),
            kv_total_blocks=info.total_blocks,
            kv_leased_blocks=sum(self._leases.values()),
            step_time_s=recorder.step_time_s,
            steps=recorder.steps,
            kv_leases=len(self._leases),
            kv_leases_expired=self._leases_expired,
        )

    async def reset_prefix_cache(self) -> bool:
        """See `Engine.reset_prefix_cache`."""
        if self._llm is None or self._events is None:
            return False
        done = await self._llm.reset_prefix_cache()
        if done:
            self._events.clear()
        return bool(done)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _identity(prompt: Sequence[int]) -> bytes:
    """Tells this prompt from every other, so that KV of one is never read for another."""
    return hashlib.sha256(array("I", prompt)).digest()
