"""gRPC `inference.v1`: the same pipeline as the HTTP API, for programs in any language."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from controlplane.errors import DeadlineExceeded, InvalidRequest, Overloaded, TokenmillError, Unavailable
from engines.base import MAX_LOGPROBS, FinishReason, Usage
from services.frontend.answer import Logprobs
from services.frontend.fields import Fields
from services.frontend.front_door import FrontDoor
from services.frontend.generation import Generation
from services.frontend.openai_requests import Options, check_message, read_stop
from services.frontend.routing import Routing, read_routing
from services.frontend.sampling import read_sampling
from services.frontend.stage import Stage
from services.frontend.tokenizer import Tokenizer
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["InferenceServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_TOKENS = 2**31 - 1
_MAX_UNREAD = 65_536
"""Tokens kept for a client that does not read."""
_STARTS_S = 10.0
_LAST_WRITES_S = 1.0
"""Time after a request's deadline for the client to take what is left."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What a call's metadata says."""

    trace_id: str
    routing: Routing


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Raises `TokenmillError`; the service host's interceptor turns it into a status with details."""

    def __init__(self) -> None:
        self._open: FrontDoor | None = None
        self._opened = asyncio.Event()

    def serve(self, door: FrontDoor) -> None:
        """Takes calls from now on. Those that came before have waited for a moment: the port may be another's, too."""
        self._open = door
        self._opened.set()

    async def _wait_open(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STARTS_S):
                await self._opened.wait()

    @property
    def _door(self) -> FrontDoor:
        if self._open is None:
            raise Unavailable("this frontend is still starting; try again later", retry_after_s=1.0)
        return self._open

    async def Generate(  # type: ignore[override]  # noqa: N802  grpc.aio takes a coroutine that writes, too
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """A completion of one prompt."""
        await self._wait_open()
        with self._come_in("Generate", context) as head, self._door.admit(1):
            options, deadline = _options(request, head.routing), self._check(request, context)
            prompt: str | array[int]
            match request.WhichOneof("input"):
                case "prompt":
                    prompt = request.prompt
                case "prompt_token_ids":
                    prompt = array("I", request.prompt_token_ids.ids)
                case _:
                    raise InvalidRequest("neither prompt nor prompt_token_ids is set; set one", param="prompt")
            generations = await self._door.complete(options, [prompt], head.trace_id, deadline)
            await self._respond(generations[0], context)

    async def Chat(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> None:
        """The assistant's next message."""
        await self._wait_open()
        with self._come_in("Chat", context) as head, self._door.admit(1):
            options, deadline = _options(request, head.routing), self._check(request, context)
            if not request.messages:
                raise InvalidRequest("messages is empty; send at least one", param="messages")
            messages = [
                check_message({"role": message.role, "content": message.content}, f"messages[{i}]")
                for i, message in enumerate(request.messages)
            ]
            generations = await self._door.chat(options, messages, {}, head.trace_id, deadline)
            await self._respond(generations[0], context)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """What can be served now."""
        await self._wait_open()
        with self._come_in("ListModels", context):
            models = self._door.models
            return inference_pb2.ListModelsResponse(
                models=[
                    inference_pb2.Model(
                        name=model.name,
                        max_model_len=model.card.max_model_len,
                        ready_workers=len(models.workers(model.name)),
                    )
                    for model in models.servable()
                ]
            )

    @contextmanager
    def _come_in(self, method: str, context: Context) -> Iterator[_Head]:
        """What its metadata says, once its key was checked; counts the call by what came of it."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        status = grpc.StatusCode.UNKNOWN
        try:
            tenant = self._door.authenticate(metadata.get("authorization", ""))
            routing = read_routing(lambda name: metadata.get(name, ""), tenant)
            yield _Head(self._door.trace_id(metadata.get("x-request-id", "")), routing)
            status = grpc.StatusCode.OK
        except TokenmillError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._door.metrics.requests.labels(f"inference.v1/{method}", status.name).inc()

    def _check(self, request: Message, context: Context) -> float:
        """When the call must be over, by its own deadline or ours. Raises `InvalidRequest` for one over the bound."""
        most = self._door.settings.max_body_mb << 20
        if request.ByteSize() > most:
            raise InvalidRequest(f"the request is over {most} bytes; send less, or raise max_body_mb")
        return self._door.deadline(asyncio.get_running_loop().time(), context.time_remaining())

    async def _respond(self, generation: Generation, context: Context) -> None:
        """Whatever has gathered since the last response makes the next one. Cancelling this cancels the answer."""
        task = asyncio.current_task()
        assert task is not None
        gathered = _Gathered(generation, on_overflow=task.cancel)
        run = asyncio.create_task(self._door.run([generation], gathered), name=f"generate {generation.request_id}")
        run.add_done_callback(lambda _: gathered.some.set())
        try:
            async with asyncio.timeout_at(generation.deadline + _LAST_WRITES_S):
                while not run.done():
                    await gathered.some.wait()
                    gathered.some.clear()
                    if gathered:
                        await context.write(gathered.take())
                await run
                if gathered:
                    await context.write(gathered.take())
        except TimeoutError:
            raise DeadlineExceeded("the answer was not read in the time allowed for this request") from None
        except asyncio.CancelledError:
            if run.done():
                self._door.count_cancelled(Stage.WRITING)
            if gathered.overflown and not task.uncancel():
                raise Overloaded(f"more than {_MAX_UNREAD} tokens were left unread, so the answer was ended") from None
            raise
        finally:
            run.cancel()
            await asyncio.wait({run})


class _Gathered:
    """A `Listener` that keeps what the next response will carry."""

    def __init__(self, generation: Generation, on_overflow: Callable[[], object]) -> None:
        self.some = asyncio.Event()
        self.overflown = False
        self._on_overflow = on_overflow
        self._id = generation.trace_id
        self._tokenizer: Tokenizer = generation.model.tokenizer
        self._response = inference_pb2.GenerateResponse(request_id=self._id)
        self._sent = False

    def __bool__(self) -> bool:
        response = self._response
        return bool(response.token_ids or response.text or response.finish_reason)

    def take(self) -> inference_pb2.GenerateResponse:
        """Everything since the last time."""
        response, self._response = self._response, inference_pb2.GenerateResponse(request_id=self._id)
        self._sent = True
        return response

    def on_output(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        if len(self._response.token_ids) + len(token_ids) > _MAX_UNREAD:
            if not self.overflown:
                self.overflown = True
                self._on_overflow()
            return
        self._response.text += text
        self._response.token_ids.extend(token_ids)
        for position in logprobs:
            tokens = [
                inference_pb2.TokenLogprob(
                    token_id=one.token_id,
                    text=self._tokenizer.token_bytes(one.token_id).decode(errors="replace"),
                    logprob=one.logprob,
                )
                for one in position.tokens
            ]
            self._response.logprobs.append(inference_pb2.PositionLogprobs(tokens=tokens))
        self.some.set()

    def on_end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        self._response.finish_reason = common_pb2.FinishReason.ValueType(reason.value)
        self._response.usage.CopyFrom(
            common_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                remote_tokens=usage.remote_tokens,
            )
        )
        self.some.set()

    def sent(self, index: int) -> bool:
        return self._sent

    def on_restart(self, index: int) -> None:
        self._response = inference_pb2.GenerateResponse(request_id=self._id)


def _options(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, routing: Routing) -> Options:
    """The same ranges and refusals as over HTTP."""
    fields = Fields(_given(request.sampling), "sampling.")
    max_tokens = fields.integer("max_tokens", minimum=1, maximum=_MAX_TOKENS)
    logprobs = fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)
    return Options(
        model=request.model,
        sampling=read_sampling(fields, max_tokens=max_tokens, logprobs=logprobs),
        stop=read_stop(Fields({"stop": list(request.stop)})),
        routing=routing.with_priority(request.priority or None),
    )


def _given(message: Message) -> dict[str, Any]:
    """The fields that were set, in plain types."""
    return {
        descriptor.name: list(value) if descriptor.is_repeated else value for descriptor, value in message.ListFields()
    }
