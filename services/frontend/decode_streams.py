"""The Attach streams: one to each decode worker, over which all its answers come.

A message carries what one engine step gave every request; one pass over it feeds all answers. Nothing is awaited and no
task is woken for a single token. A stream that is silent for three seconds, heartbeats included, is a lost worker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import grpc

from controlplane.channels import Channels
from controlplane.errors import EngineFailed, TokenmillError, Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.telemetry import Logger, get_logger
from services.frontend.answer import Answer
from services.frontend.metrics import FrontendMetrics
from services.frontend.migration import FrontendFailed, FrontendStops
from services.frontend.progress import Progress, Pulse
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc

__all__ = ["DecodeStream", "DecodeStreams"]

_SILENT_TICKS = 3
"""Ticks of a second without a message. Ticks, not time: a stall of this process must not count as the worker's."""
_TICK_S = 1.0
_OPEN_TIMEOUT_S = 3.0
_RETRY_AFTER_S = 1.0
_CANCEL_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.5
_LAST_WORD_S = 1.0
"""Longest wait for a worker's usage once a stop string has ended an answer."""


class DecodeStream:
    """The stream to one worker, and the answers that come over it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, metrics: FrontendMetrics, log: Logger) -> None:
        self.address = address
        self.stub = decode_pb2_grpc.DecodeStub(channel)
        self.attach_id = uuid.uuid4().hex
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attached.add_done_callback(lambda attached: attached.cancelled() or attached.exception())
        self._answers: dict[int, Answer] = {}
        self._last_slot = 0
        self._to_cancel: list[str] = []
        self._cancel_soon = asyncio.Event()
        self._progress: dict[int, Progress] = {}
        """As long as `_answers`."""
        self._silent_ticks = 0
        self._end_reason = "ended"
        self._call: grpc.aio.UnaryStreamCall[decode_pb2.AttachRequest, decode_pb2.StepBatch] | None = None
        self._metrics = metrics
        self._log = log

    @property
    def load(self) -> int:
        """Answers in the making."""
        return len(self._answers)

    @property
    def is_open(self) -> bool:
        """Attached, and not ended since."""
        return self.attached.done() and not self.attached.cancelled() and self.attached.exception() is None

    def add(self, answer: Answer) -> int:
        """The slot that names this answer on this stream from now on."""
        self._last_slot += 1  # never reused: a late token of an earlier request must not reach a later one
        slot = self._last_slot
        self._answers[slot] = answer
        self._progress[slot] = Progress(answer.emitted)
        answer.on_stop = lambda: self._stop(slot)
        return slot

    def forget(self, slot: int, *, cancel: bool) -> None:
        """Nothing more is wanted of this answer; `cancel` tells the worker, at once."""
        answer = self._pop(slot)
        if answer is not None and cancel:
            self._cancel(answer)

    def deliver(self, batch: decode_pb2.StepBatch) -> None:
        """One pass over everything a message brings. Raises `EngineFailed` for one that cannot be read."""
        self._silent_ticks = 0
        now = asyncio.get_running_loop().time()
        answers = self._answers
        token_ids = list(batch.token_ids)
        if len(batch.slots) != len(batch.counts) or sum(batch.counts) != len(token_ids):
            raise EngineFailed("brought a message whose columns do not fit each other")
        logprobs = {entry.slot: entry.positions for entry in batch.logprobs}
        start = 0
        for slot, count in zip(batch.slots, batch.counts, strict=False):
            end = start + count
            answer = answers.get(slot)
            if answer is not None and count:
                try:
                    answer.take(token_ids[start:end], logprobs.get(slot, ()), now)
                except Exception as error:  # must not take the others down
                    self._broken(slot, answer, error)
            start = end
        self._metrics.completion_tokens.inc(start)
        for finished in batch.finished:
            answer = self._pop(finished.slot)
            if answer is not None:
                try:
                    answer.finish(finished)
                except Exception as error:  # must not take the others down
                    self._broken(finished.slot, answer, error)
        if batch.HasField("pulse"):
            self._judge(batch.pulse)

    async def read(self, min_flush_ms: int) -> None:
        """Feeds the answers until the stream ends, however it does; then they fail."""
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send_cancels(), name=f"cancels {self.address}")
                request = decode_pb2.AttachRequest(attach_id=self.attach_id, min_flush_ms=min_flush_ms)
                self._call = self.stub.Attach(request)
                await self._call.initial_metadata()
                if not self._call.done():  # a refused call, too, has (empty) metadata
                    self.attached.set_result(None)
                async for batch in self._call:
                    self.deliver(batch)
                sender.cancel()
        except* (grpc.aio.AioRpcError, EngineFailed) as failed:
            self._end_reason = "; ".join(
                one.message if isinstance(one, EngineFailed) else f"broke: {from_rpc_error(one).message}"
                for one in failed.exceptions
                if isinstance(one, grpc.aio.AioRpcError | EngineFailed)
            )
        finally:
            self.fail(Unavailable(f"the stream to the decode worker at {self.address} {self._end_reason}"))

    def tick(self) -> None:
        """Once a second: ends a stream that has gone silent."""
        self._silent_ticks += 1
        if self._silent_ticks > _SILENT_TICKS:
            self.close(f"was silent for {_SILENT_TICKS} s")

    def close(self, reason: str = "was closed") -> None:
        """Ends the stream; the worker cancels what it still runs for it."""
        self._end_reason = reason
        if self._call is not None:
            self._call.cancel()

    def fail(self, error: TokenmillError) -> None:
        """Ends the stream, and with it all answers that are to come by it."""
        self.close(self._end_reason)
        if not self.attached.done():
            self.attached.set_exception(error)
        elif self._end_reason != "was closed":
            self._metrics.lost_streams.inc()
            self._log.warning("decode worker lost", address=self.address, answers=self.load, reason=self._end_reason)
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
        self._progress.clear()

    def _judge(self, message: decode_pb2.Pulse) -> None:
        """Gives up the answers that this worker does not go on with, though it lives."""
        pulse = Pulse(
            message.waiting_requests, message.queued_prefill_tokens, message.step_time_us * 1e-6, message.steps
        )
        stuck = [slot for slot, one in self._progress.items() if one.is_stuck(self._answers[slot].emitted, pulse)]
        for slot in stuck:
            self._answers[slot].fail(Unavailable("the worker lives, but gave this answer no token for too long"))
            self.forget(slot, cancel=True)

    def _pop(self, slot: int) -> Answer | None:
        self._progress.pop(slot, None)
        return self._answers.pop(slot, None)

    def _stop(self, slot: int) -> None:
        """A stop string ended the answer; the worker's last word, its usage, is waited for a little."""
        answer = self._answers[slot]
        self._cancel(answer)
        no_word = Unavailable("the worker did not confirm the end of the answer")
        asyncio.get_running_loop().call_later(_LAST_WORD_S, answer.fail, no_word)

    def _cancel(self, answer: Answer) -> None:
        self._to_cancel.append(answer.request_id)
        self._cancel_soon.set()

    async def _send_cancels(self) -> None:
        """One call for all that gathered while the one before was under way."""
        while True:
            await self._cancel_soon.wait()
            self._cancel_soon.clear()
            ids, self._to_cancel = self._to_cancel, []
            try:
                await self.stub.Cancel(decode_pb2.CancelRequest(request_ids=ids), timeout=_CANCEL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                # Again, for as long as this stream lives. With the stream the worker cancels all that came by it.
                self._log.warning("cancel failed", address=self.address, requests=len(ids), reason=error.code().name)
                self._to_cancel += ids
                self._cancel_soon.set()
                await asyncio.sleep(_CANCEL_AGAIN_S)

    def _broken(self, slot: int, answer: Answer, error: Exception) -> None:
        self._log.error("answer failed unexpectedly", request_id=answer.request_id, exc_info=error)
        if not answer.ended.done():
            answer.ended.set_exception(FrontendFailed("internal error; the frontend's log says more"))
        self.forget(slot, cancel=True)


class DecodeStreams:
    """Owns the streams. Keeps one to every worker it is told to follow, and opens others when they are asked for."""

    def __init__(self, channels: Channels, min_flush_ms: int, metrics: FrontendMetrics) -> None:
        self._channels = channels
        self._min_flush_ms = min_flush_ms
        self._metrics = metrics
        self._log = get_logger(__name__)
        self._streams: dict[str, DecodeStream] = {}
        self._followed: frozenset[str] = frozenset()
        self._tasks: asyncio.TaskGroup | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a stream has opened or ended."""

    async def run(self) -> None:
        """Watches and mends the streams, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                while True:
                    self._match_followed()
                    await asyncio.sleep(_TICK_S)
                    for stream in list(self._streams.values()):
                        stream.tick()
            finally:
                self._tasks = None
                for stream in list(self._streams.values()):
                    stream.close()
                    stream.fail(_stops())

    def follow(self, addresses: frozenset[str]) -> None:
        """The workers there are. One that left keeps its stream until its last answer is done."""
        self._followed = addresses
        self._match_followed()

    def load(self, address: str) -> int:
        """Answers this frontend has in the making there."""
        stream = self._streams.get(address)
        return stream.load if stream is not None else 0

    def is_open(self, address: str) -> bool:
        """Whether answers can come from there now."""
        stream = self._streams.get(address)
        return stream is not None and stream.is_open

    def stream_id(self, address: str) -> str:
        """Of the open stream; empty: there is none."""
        return self._streams[address].attach_id if self.is_open(address) else ""

    async def get(self, address: str) -> DecodeStream:
        """An open stream to this worker. Raises `Unavailable`."""
        stream = self._streams.get(address) or self._open(address)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await asyncio.shield(stream.attached)
        except TimeoutError:
            raise Unavailable(
                f"the decode worker at {address} did not open its stream in {_OPEN_TIMEOUT_S:g} s"
            ) from None
        return stream

    def _match_followed(self) -> None:
        if self._tasks is None:
            return
        for address in self._followed - self._streams.keys():
            self._open(address)
        for address in self._streams.keys() - self._followed:
            if not self._streams[address].load:
                self._streams[address].close()

    def _open(self, address: str) -> DecodeStream:
        if self._tasks is None:
            raise _stops()
        stream = DecodeStream(address, self._channels.get(address), self._metrics, self._log)
        self._streams[address] = stream
        self._tasks.create_task(self._read(stream), name=f"decode stream {address}")
        stream.attached.add_done_callback(lambda _: self.on_change())
        return stream

    async def _read(self, stream: DecodeStream) -> None:
        try:
            await stream.read(self._min_flush_ms)
        finally:
            del self._streams[stream.address]
            self.on_change()


def _stops() -> FrontendStops:
    return FrontendStops("this frontend is stopping; try again", retry_after_s=_RETRY_AFTER_S)
