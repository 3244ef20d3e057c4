"""The Decode gRPC service: protobuf in, `LiveRequests` does the work."""

from __future__ import annotations

import time
import uuid
from typing import Any

import grpc

from controlplane.errors import InvalidRequest, Unavailable
from engines.base import EngineInfo, EngineRequest
from engines.host.admission import check_decode, check_epoch, check_model
from engines.host.convert import handle_age_s, handle_from_proto, pulse_to_proto, sampling_from_proto
from engines.host.live import DecodeLimits, LiveRequests
from engines.host.started import StartedEngine
from tokenmill.decode.v1 import decode_pb2, decode_pb2_grpc

__all__ = ["DecodeService"]

_MAX_FLUSH_MS = 20
_DEFAULT_FLUSH_MS = 1
_PULSE_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Refuses every call `Unavailable` until `serve`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._serving: tuple[LiveRequests, StartedEngine] | None = None

    def add_to(self, server: grpc.aio.Server) -> str:
        """Returns the service's full name."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        return decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

    def serve(self, started: StartedEngine) -> None:
        """Takes calls from now on."""
        self._serving = LiveRequests(started, self._limits), started

    @property
    def busy(self) -> int:
        """Requests that the engine should be working on."""
        return self._serving[0].busy if self._serving is not None else 0

    def halt(self, reason: str) -> None:
        """Fails what runs and refuses what comes, until `go_on`."""
        if self._serving is not None:
            self._serving[0].halt(reason)

    def go_on(self) -> None:
        """Takes requests again."""
        if self._serving is not None:
            self._serving[0].go_on()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits for the running ones; those that outlast `timeout_s` fail."""
        if self._serving is not None:
            await self._serving[0].drain(timeout_s)

    def resume(self) -> None:
        """Takes new requests again after a `drain`."""
        if self._serving is not None:
            self._serving[0].resume()

    def unfinished(self) -> int:
        """Requests alive."""
        return len(self._serving[0]) if self._serving is not None else 0

    def close(self) -> None:
        """Lets every stream end once it has sent what it has."""
        if self._serving is not None:
            self._serving[0].close()

    async def Submit(  # noqa: N802  this and the others are gRPC's names
        self, request: decode_pb2.SubmitRequest, context: Context
    ) -> decode_pb2.SubmitResponse:
        """Hands a request to the engine; its answer goes to the Attach stream."""
        live, started = self._ready()
        check_epoch(request.epoch, started.epoch)
        stream = live.stream(request.attach_id)
        engine_request = _engine_request(request, started.info)
        await live.submit(
            engine_request,
            stream,
            request.slot,
            timeout_s=request.timeout_ms / 1000,
            handle_age_s=handle_age_s(request.kv),
        )
        return decode_pb2.SubmitResponse()

    async def Cancel(  # noqa: N802
        self, request: decode_pb2.CancelRequest, context: Context
    ) -> decode_pb2.CancelResponse:
        """Ends requests early; unknown ones are no error."""
        live, _ = self._ready()
        return decode_pb2.CancelResponse(cancelled=live.cancel(request.request_ids))

    async def Attach(  # type: ignore[override]  # noqa: N802  grpc.aio takes a coroutine that writes, too
        self, request: decode_pb2.AttachRequest, context: Context
    ) -> None:
        """Sends every answer of one frontend until the stream breaks; then its requests are cancelled."""
        live, started = self._ready()
        flush_ms = request.min_flush_ms if request.HasField("min_flush_ms") else _DEFAULT_FLUSH_MS
        if not request.attach_id:
            raise InvalidRequest("attach_id is empty: choose a unique one", param="attach_id")
        if flush_ms > _MAX_FLUSH_MS:
            message = f"min_flush_ms is {flush_ms}; it must be at most {_MAX_FLUSH_MS}"
            raise InvalidRequest(message, param="min_flush_ms")
        stream = live.attach(request.attach_id, flush_ms / 1000)
        pulse_at = 0.0

        async def write(batch: decode_pb2.StepBatch) -> None:
            nonlocal pulse_at
            if (now := time.monotonic()) >= pulse_at:
                pulse_at = now + _PULSE_S
                batch.pulse.CopyFrom(pulse_to_proto(started.engine.load()))
            await context.write(batch)

        try:
            # Tells the frontend that it may submit.
            await context.send_initial_metadata(())
            await stream.run(write)
        finally:
            live.detach(stream)

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: decode_pb2.GenerateRequest, context: Context
    ) -> None:
        """One request on a stream of its own."""
        live, started = self._ready()
        engine_request = _engine_request(request, started.info)
        stream = live.attach(f"generate-{uuid.uuid4().hex}", _DEFAULT_FLUSH_MS / 1000)

        async def write(batch: decode_pb2.StepBatch) -> None:
            if batch.finished:
                stream.close()
            if batch.slots or batch.finished:
                await context.write(_generate_response(batch))

        try:
            await live.submit(
                engine_request,
                stream,
                0,
                timeout_s=context.time_remaining() or 0,
                handle_age_s=handle_age_s(request.kv),
            )
            await stream.run(write)
        finally:
            live.detach(stream)

    def _ready(self) -> tuple[LiveRequests, StartedEngine]:
        if self._serving is None:
            raise Unavailable("this worker is still loading its model: try another")
        return self._serving


def _engine_request(request: decode_pb2.SubmitRequest | decode_pb2.GenerateRequest, info: EngineInfo) -> EngineRequest:
    """Checked, so that the engine hears only of what it can answer."""
    if not request.request_id:
        raise InvalidRequest("request_id is empty: choose a unique one", param="request_id")
    check_model(request.model, info)
    engine_request = EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling=sampling_from_proto(request.sampling),
        kv=handle_from_proto(request.kv, time.monotonic()) if request.HasField("kv") else None,
        priority=request.priority,
    )
    check_decode(engine_request, info)
    return engine_request


def _generate_response(batch: decode_pb2.StepBatch) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(
        token_ids=batch.token_ids,
        logprobs=batch.logprobs[0].positions if batch.logprobs else (),
        finished=batch.finished[0] if batch.finished else None,
    )
