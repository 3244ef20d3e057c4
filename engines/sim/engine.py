"""A simulated engine behind the engine interface: no model, but real scheduling, real time and real KV transfers."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from controlplane.errors import Cancelled, EngineFailed, InvalidRequest, SettingsError
from engines.base import (
    Capability,
    EngineInfo,
    EngineRequest,
    Failure,
    FinishReason,
    Handle,
    KvEventSink,
    KvOutcome,
    LoadSnapshot,
    PrefillResult,
    Role,
    StepOutput,
    StepSink,
)
from engines.sim.clock import PacedClock
from engines.sim.config import SimConfig
from engines.sim.profile import profile
from engines.sim.scheduler import Scheduler, Step
from engines.sim.sequence import Sequence, Stage, TokenSequence
from engines.sim.tokens import TokenSource, Vocabulary, builtin_vocabulary, load_vocabulary
from kvcache.format import KvFormat
from kvcache.hashing import hash_blocks, root_hash
from transfer import TransferError

if TYPE_CHECKING:
    # They need numpy, which an engine without bytes behind its blocks does not.
    from engines.sim.handoff import Handoff, Offer
    from engines.sim.kv_memory import KvMemory

__all__ = ["SimEngine"]

_CONTENT_VERSION = "1"
"""Of the rule that gives a block its bytes; see `kv_memory.py`."""


class SimEngine:
    """Implements `engines.base.Engine`. It can both hold and read KV, whatever its role."""

    def __init__(
        self, config: SimConfig, role: Role, instance_id: str, hash_seed: int, advertise_host: str = "127.0.0.1"
    ) -> None:
        self._config = config
        self._name = f"{role}-{instance_id}-{uuid.uuid4().hex[:8]}"
        """Never used twice: peers know the transfer agent by it."""
        self._hash_seed = hash_seed
        self._advertise_host = advertise_host
        self._clock = PacedClock(config.time_scale)
        self._work = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._live: dict[str, TokenSequence] = {}
        """Until the end has been delivered."""
        self._prefills: dict[str, asyncio.Future[PrefillResult]] = {}
        self._offers: dict[str, tuple[Handle, Offer]] = {}
        """KV to read, by request id, until it is read or declined."""
        self._delivering: Step = Step()
        """Done by the scheduler, not yet told."""
        self._handles = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: str | None = None
        self._stopped = False
        self._memory: KvMemory | None = None
        self._handoff: Handoff | None = None

    # Life

    async def start(self, on_kv_events: KvEventSink, on_progress: Callable[[str], None]) -> EngineInfo:
        """See `Engine.start`."""
        config = self._config
        timing = profile(config.profile)
        self._on_kv_events = on_kv_events
        on_progress("loading the tokenizer")
        self._vocabulary = await asyncio.to_thread(_vocabulary, config.model)
        self._format = _format(config, self._vocabulary)
        self._root = root_hash(self._format.model_fingerprint, seed=self._hash_seed)
        self._scheduler = Scheduler(
            config.total_blocks, config.block_size, config.max_num_seqs, config.max_batched_tokens,
            timing,
        )  # fmt: skip
        if config.kv_bytes_per_block:
            on_progress("starting the transfer agent")
            await self._open_handoff()
        if config.fault == "hang":
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, self._may_step.clear)
            loop.add_signal_handler(signal.SIGUSR2, self._may_step.set)
        self._own(self._run(), "sim-steps")
        return self._info()

    async def _open_handoff(self) -> None:
        try:
            from engines.sim.handoff import Handoff
            from engines.sim.kv_memory import KvMemory

            self._memory = KvMemory(self._config.total_blocks, self._config.kv_bytes_per_block)
            self._handoff = await Handoff.open(
                self._name, self._advertise_host, self._memory, self._config.read_timeout_s
            )
        except (ModuleNotFoundError, TransferError) as error:
            raise SettingsError(
                f"the sim engine cannot move KV: {error}. Install tokenmill with the extra nixl, or set "
                "kv_bytes_per_block to 0 to serve without transfers",
                param="kv_bytes_per_block",
            ) from error
        self._handoff.on_read(self._on_read)

    async def stop(self) -> None:
        """See `Engine.stop`. Live requests end with CANCELLED."""
        self._stopped = True
        for request_id in list(self._live):
            self.abort(request_id)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._handoff is not None:
            await self._handoff.close()
            self._handoff = None

    def failed(self) -> str | None:
        """See `Engine.failed`."""
        return self._failure

    def _info(self) -> EngineInfo:
        config = self._config
        capabilities = {Capability.SEED, Capability.MIN_TOKENS, Capability.PRIORITY, Capability.KV_EVENTS}
        if self._handoff is not None:
            capabilities |= {Capability.HOLD_KV, Capability.REMOTE_PREFILL}
        return EngineInfo(
            model=config.served_model_name or Path(config.model).name or "sim",
            tokenizer=self._vocabulary.tokenizer,
            format=self._format,
            total_blocks=config.total_blocks,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=config.max_model_len,
            vocab_size=self._vocabulary.size,
            eos_token_ids=self._vocabulary.eos_token_ids,
            capabilities=frozenset(capabilities),
        )

    # Requests

    async def generate(self, request: EngineRequest, sink: StepSink) -> None:
        """See `Engine.generate`."""
        outcome, offer = KvOutcome.NONE, None
        if request.kv is not None:
            offer = self._accept(request.kv)
            outcome = KvOutcome.NONE if offer else KvOutcome.INCOMPATIBLE
        sequence = self._sequence(request, sink, handle_blocks=len(offer.blocks) if offer else 0)
        sequence.kv_outcome = outcome
        if offer is not None and request.kv is not None:
            if sequence.handle_blocks:
                self._offers[request.request_id] = request.kv, offer
            else:
                sequence.kv_outcome = KvOutcome.LOCAL
                self._decline(request.kv, offer)
        self._admit(sequence)

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        """See `Engine.prefill`. Holds the full blocks before the prompt's last token."""
        sequence = self._sequence(request, None, prefill_only=True)
        future: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self._prefills[request.request_id] = future
        self._admit(sequence)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                await self.release(future.result().handle_id)
            else:
                self.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.abort(request_id)
        if sequence.stage is not Stage.READING:
            self._decline_offer(request_id)
        future = self._prefills.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(Cancelled(f"request {request_id} was cancelled"))
        usage = sequence.usage
        if any(emitter is sequence for emitter, _ in self._delivering.emitted):
            usage = replace(usage, completion_tokens=usage.completion_tokens - 1)
        self._finish(sequence, StepOutput(request_id, (), FinishReason.CANCELLED, usage))
        self._work.set()
        return True

    async def release(self, handle_id: str) -> bool:
        """See `Engine.release`."""
        return self._on_read(handle_id)

    def load(self) -> LoadSnapshot:
        """See `Engine.load`."""
        return self._scheduler.load()

    async def reset_prefix_cache(self) -> bool:
        """See `Engine.reset_prefix_cache`."""
        done = self._scheduler.reset_prefix_cache()
        self._tell_events()
        return done

    def _sequence(
        self, request: EngineRequest, sink: StepSink | None, *, handle_blocks: int = 0, prefill_only: bool = False
    ) -> TokenSequence:
        if self._failure or self._stopped:
            raise EngineFailed(self._failure or "the engine is stopped")
        config = self._config
        prompt = array("I", request.prompt_token_ids)
        if not 0 < len(prompt) < config.max_model_len:
            raise InvalidRequest(
                f"prompt_token_ids has {len(prompt)} tokens; it must have 1 to {config.max_model_len - 1}, "
                "to leave room for an answer",
                param="prompt_token_ids",
            )
        if request.request_id in self._live:
            raise InvalidRequest("a request of this request_id is running already", param="request_id")
        sampling = request.sampling
        room = config.max_model_len - len(prompt)
        answer_tokens = config.answer_tokens if sampling.max_tokens is None and not sampling.ignore_eos else 0
        seed = config.seed ^ (sampling.seed or 0)
        hashes = hash_blocks(prompt, config.block_size, self._root, self._hash_seed)
        return TokenSequence(
            request.request_id,
            prompt,
            hashes,
            sampling,
            TokenSource(self._vocabulary, prompt, seed, answer_tokens),
            block_size=config.block_size,
            hash_root=self._root,
            hash_seed=self._hash_seed,
            end_at=len(prompt) + min(sampling.max_tokens or room, room),
            eos_token_ids=self._vocabulary.eos_token_ids,
            priority=request.priority,
            handle_blocks=min(handle_blocks, self._scheduler.readable_blocks(len(prompt))),
            prefill_only=prefill_only,
            owner=sink,
        )

    def _admit(self, sequence: TokenSequence) -> None:
        self._live[sequence.request_id] = sequence
        self._scheduler.add(sequence)
        self._work.set()

    # Steps

    async def _run(self) -> None:
        while True:
            await self._may_step.wait()
            self._work.clear()
            step = self._scheduler.step(self._clock.now())
            if self._handoff is not None:
                self._handoff.expect_reads(self._scheduler.next_expiry() is not None)
            if step.did_nothing:
                await self._wait()
                continue
            self._begin(step)
            self._delivering = step
            await self._clock.let_pass(step.duration_s)
            self._delivering = Step()
            self._deliver(step)

    async def _wait(self) -> None:
        expiry = self._scheduler.next_expiry()
        try:
            async with asyncio.timeout(None if expiry is None else max(0.0, expiry - self._clock.now())):
                await self._work.wait()
        except TimeoutError:
            pass
        self._clock.rest()

    def _begin(self, step: Step) -> None:
        """What must be true while the step runs: bytes lie where they belong, reads are under way."""
        if self._memory is not None:
            for block, block_hash in step.filled:
                self._memory.fill(block, block_hash)
        for sequence in step.unneeded:
            self._decline_offer(sequence.request_id)
        for sequence in step.reads:
            self._own(self._read(sequence), f"sim-read-{sequence.request_id}")

    def _deliver(self, step: Step) -> None:
        """Tells everyone what the step gave."""
        batches: dict[Any, list[StepOutput]] = {}
        for sequence, finish in step.emitted:
            sink = sequence.owner
            if sink is None:
                continue  # aborted meanwhile
            output = StepOutput(sequence.request_id, self._live[sequence.request_id].tokens[-1:], finish)
            if finish is not None:
                output.usage = sequence.usage
                output.kv_outcome = sequence.kv_outcome
                del self._live[sequence.request_id]
            batch = batches.get(sink)
            if batch is None:
                batches[sink] = [output]
            else:
                batch.append(output)
        for sequence in step.prefilled:
            self._hand_over(sequence)
        self._tell_events()
        for sink, outputs in batches.items():
            sink(outputs)

    def _tell_events(self) -> None:
        events = self._scheduler.drain_events()
        if events:
            self._on_kv_events(events)

    def _finish(self, sequence: Sequence, output: StepOutput) -> None:
        """An end outside of any step."""
        sink: Any = sequence.owner
        sequence.owner = None
        output.kv_outcome = sequence.kv_outcome
        if sink is not None:
            sink([output])

    # Handing KV over

    def _hand_over(self, sequence: Sequence) -> None:
        """Holds a computed prompt's blocks and answers its caller."""
        future = self._prefills.pop(sequence.request_id, None)
        if future is None or future.done() or self._handoff is None or self._memory is None:
            self._scheduler.abort(sequence.request_id)
            return
        del self._live[sequence.request_id]
        count = self._scheduler.readable_blocks(sequence.prompt_tokens)
        blocks = sequence.blocks[:count]
        engine_params, digests = self._handoff.offer(blocks)
        if self._config.fault == "corrupt-block" and blocks:
            self._memory.view(blocks[0])[0] ^= 0xFF
        self._handles += 1
        handle_id = f"{self._name}-{self._handles}"
        self._scheduler.hold(sequence, handle_id, self._clock.now() + self._config.lease_s)
        self._handoff.expect_reads(True)
        future.set_result(
            PrefillResult(
                handle_id,
                count * self._config.block_size,
                sequence.cached_tokens or 0,
                engine_params,
                digests,
                self._config.lease_s,
            )
        )

    def _on_read(self, handle_id: str) -> bool:
        """A handle's blocks are no longer needed."""
        released = self._scheduler.release(handle_id)
        self._work.set()
        return released

    def _accept(self, handle: Handle) -> Offer | None:
        if self._handoff is None or self._format.differences(handle.format):
            return None
        return self._handoff.accept(handle)

    async def _read(self, sequence: Sequence) -> None:
        """Reads a sequence's blocks from the worker that holds them."""
        assert self._handoff is not None
        handle, offer = self._offers.pop(sequence.request_id)
        first, end = sequence.computed // self._config.block_size, sequence.handle_blocks
        late = self._config.fault == "late-read"
        delay_s = max(0.0, handle.received_at + handle.lease_s - time.monotonic()) + 0.05 if late else 0.0
        reception = await self._handoff.read(
            handle, offer, first, sequence.blocks[first:end], sequence.hashes[first:end], delay_s
        )
        read = reception.unfinished
        if read is None or read.ended.done():
            self._scheduler.finish_read(sequence, reception.outcome)
        else:
            blocks = self._scheduler.abandon_read(sequence, reception.outcome)
            read.ended.add_done_callback(lambda _: self._reclaim(blocks))
        self._work.set()

    def _reclaim(self, blocks: list[int]) -> None:
        self._scheduler.reclaim(blocks)
        self._work.set()

    def _decline_offer(self, request_id: str) -> None:
        if request_id in self._offers:
            self._decline(*self._offers.pop(request_id))

    def _decline(self, handle: Handle, offer: Offer) -> None:
        if self._handoff is not None:
            self._own(self._handoff.decline(handle, offer), f"sim-decline-{handle.handle_id}")

    # Tasks

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"{task.get_name()} failed: {type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if self._failure is not None:
            return
        self._failure = why
        failure = Failure(EngineFailed.code, why)
        prefills, self._prefills = self._prefills, {}
        for future in prefills.values():
            if not future.done():
                future.set_exception(EngineFailed(why))
        live, self._live = self._live, {}
        for request_id, sequence in live.items():
            self._finish(sequence, StepOutput(request_id, (), FinishReason.ERROR, sequence.usage, failure))


def _vocabulary(model: str) -> Vocabulary:
    return load_vocabulary(Path(model)) if model else builtin_vocabulary()


def _format(config: SimConfig, vocabulary: Vocabulary) -> KvFormat:
    return KvFormat(
        model_fingerprint=f"sim-{xxh3_64_hexdigest(vocabulary.identity, config.seed & 0xFFFF_FFFF_FFFF_FFFF)}",
        dtype="bytes",
        block_size=config.block_size,
        layout=f"{config.kv_bytes_per_block}-bytes-a-block",
        engine="sim",
        engine_version=_CONTENT_VERSION,
        parallel="tp1-pp1",
    )
