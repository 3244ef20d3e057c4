"""The OpenAI HTTP API: routes, and one handler for each.

POST /v1/chat/completions, /v1/completions      GET /v1/models, /v1/models/{name}
GET /health (alive), /ready (some model can be served now), /metrics
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from controlplane.errors import Cancelled, InvalidRequest, TokenmillError, Unavailable
from controlplane.telemetry import get_logger
from engines.base import FinishReason, Usage
from services.frontend.answer import Logprobs
from services.frontend.event_stream import EventStream
from services.frontend.fields import shown
from services.frontend.front_door import FrontDoor
from services.frontend.generation import Generation
from services.frontend.http_exchange import ClientGone, Exchange
from services.frontend.intake import HeldBody
from services.frontend.models import ServedModel
from services.frontend.openai_errors import MethodNotAllowed, RouteNotFound, error_body, error_headers
from services.frontend.openai_requests import MAX_TIMEOUT_S, Options, read_chat, read_completion
from services.frontend.openai_responses import (
    DONE,
    ChatEvents,
    CompletionEvents,
    Events,
    WholeAnswer,
    chat_body,
    completion_body,
)
from services.frontend.routing import Routing, read_routing
from services.frontend.stage import Stage

__all__ = ["HttpApi"]

_ERROR_TIMEOUT_S = 5.0
"""Longest wait for a client to take what is left of a stream that failed."""

_MODEL_PATH = "/v1/models/"

T = TypeVar("T")
Handler = Callable[[Exchange], Awaitable[None]]


class HttpApi:
    """An ASGI application."""

    def __init__(self, door: FrontDoor, registry: CollectorRegistry) -> None:
        self._door = door
        self._registry = registry
        self._log = get_logger(__name__)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request. Every error becomes a response here, and only here."""
        exchange = Exchange(scope, receive, send)
        try:
            exchange.request_id = self._door.trace_id("")
            handler = self._route(exchange)
            exchange.request_id = self._door.trace_id(exchange.header(b"x-request-id"))
            if exchange.path.startswith("/v1/"):
                exchange.tenant = self._door.authenticate(exchange.header(b"authorization"))
            if exchange.method == "POST":
                self._door.check_room()  # what cannot be served is not read either
            await handler(exchange)
        except ClientGone:
            exchange.status = Cancelled.http_status
        except TokenmillError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # the client gets an answer, the log the cause
            self._log.error("request failed unexpectedly", request_id=exchange.request_id, exc_info=error)
            await self._refuse(exchange, TokenmillError("internal error; the frontend's log says more"))
        path = exchange.path
        endpoint = path if path in self._routes else "/v1/models/{name}" if path.startswith(_MODEL_PATH) else "other"
        self._door.metrics.requests.labels(endpoint, str(exchange.status)).inc()

    def _route(self, exchange: Exchange) -> Handler:
        path = exchange.path
        of_one_model = path.startswith(_MODEL_PATH) and path != _MODEL_PATH
        method, handler = ("GET", self._model) if of_one_model else self._routes.get(path, ("", None))
        if handler is None:
            raise RouteNotFound(f"there is no {path[:200]}; this API has: {', '.join(self._routes)}")
        if exchange.method != method and not (exchange.method == "HEAD" and method == "GET"):
            raise MethodNotAllowed(f"{path[:200]} takes {method}, not {exchange.method}")
        return handler

    async def _refuse(self, exchange: Exchange, error: TokenmillError) -> None:
        if exchange.status:  # it has begun, and has ended itself or cannot be mended
            return
        await exchange.skip_body()
        self._log.info(
            "request refused",
            request_id=exchange.request_id,
            path=exchange.path[:200],
            status=error.http_status,
            code=error.code,
            param=error.param,
        )
        await exchange.reply(error.http_status, error_body(error), error_headers(error))

    async def _chat(self, exchange: Exchange) -> None:
        door = self._door
        with door.bodies.hold() as held:
            request, deadline = await self._read(exchange, held, read_chat)
            options = request.options
            deadline = min(deadline, door.deadline(exchange.arrived_at, options.timeout_s))
            with door.admit(options.n):
                generations = await exchange.interruptibly(
                    door.chat(options, request.messages, request.template_arguments, exchange.request_id, deadline)
                )
                del request  # its text is not needed any more
                held.release()
                response_id = f"chatcmpl-{generations[0].request_id}"
                await self._answer(exchange, options, generations, response_id, ChatEvents, chat_body)

    async def _completions(self, exchange: Exchange) -> None:
        door = self._door
        with door.bodies.hold() as held:
            request, deadline = await self._read(exchange, held, read_completion)
            options = request.options
            deadline = min(deadline, door.deadline(exchange.arrived_at, options.timeout_s))
            with door.admit(len(request.prompts) * options.n):
                generations = await exchange.interruptibly(
                    door.complete(options, request.prompts, exchange.request_id, deadline)
                )
                del request  # its text is not needed any more
                held.release()
                response_id = f"cmpl-{generations[0].request_id}"
                await self._answer(exchange, options, generations, response_id, CompletionEvents, completion_body)

    async def _read(self, exchange: Exchange, held: HeldBody, read: Callable[[bytes, Routing], T]) -> tuple[T, float]:
        """The request, and when it must be over as far as its head says."""
        settings = self._door.settings
        deadline = self._door.deadline(exchange.arrived_at, _header_timeout_s(exchange))
        routing = read_routing(lambda name: exchange.header(name.encode()), exchange.tenant)
        try:
            body = await exchange.body(
                settings.max_body_mb << 20, held, patience_s=settings.read_timeout_s, deadline=deadline
            )
            request = await exchange.interruptibly(self._door.long_work.run(len(body), read, body, routing))
        except ClientGone:
            self._door.count_cancelled(Stage.READING)
            raise
        return request, deadline

    async def _answer(
        self,
        exchange: Exchange,
        options: Options,
        generations: Sequence[Generation],
        response_id: str,
        make_events: Callable[..., Events],
        make_body: Callable[..., bytes],
    ) -> None:
        model = generations[0].model
        if options.stream:
            events = make_events(response_id, model.name, len(generations), options.include_usage, model.tokenizer)
            await self._stream(exchange, generations, events, options.n)
            return
        answers = _WholeAnswers(len(generations))
        await exchange.interruptibly(self._door.run(generations, answers))
        await exchange.reply(200, make_body(response_id, model.name, answers.answers, options.n, model.tokenizer))

    async def _stream(self, exchange: Exchange, generations: Sequence[Generation], events: Events, n: int) -> None:
        """An error before the first event is an HTTP error; after it, an event."""
        loop = asyncio.get_running_loop()
        stream = EventStream(exchange, self._door.settings.client_buffer_kb << 10)
        answers = _StreamedAnswers(stream, events, len(generations))
        try:
            await exchange.interruptibly(self._door.run(generations, answers))
        except TokenmillError as error:
            if not stream.begun:
                raise
            if isinstance(error, Cancelled):
                self._door.metrics.slow_clients.inc()
            self._log.warning(
                "stream ended early", request_id=exchange.request_id, code=error.code, reason=error.message
            )
            await stream.finish(b"data: " + error_body(error) + b"\n\n" + DONE, _ERROR_TIMEOUT_S)
        else:
            last = events.usage(answers.usages, n) + DONE
            if not await stream.finish(last, generations[0].deadline - loop.time()):
                self._door.count_cancelled(Stage.WRITING, len(generations))

    async def _models(self, exchange: Exchange) -> None:
        models = [self._describe(model) for model in self._door.models.servable()]
        await exchange.reply(200, orjson.dumps({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        model = self._door.models.find(exchange.path.removeprefix(_MODEL_PATH))
        await exchange.reply(200, orjson.dumps(self._describe(model)))

    @staticmethod
    def _describe(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.loaded_at,
            "owned_by": "tokenmill",
            "max_model_len": model.card.max_model_len,
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"status":"alive"}')

    async def _ready(self, exchange: Exchange) -> None:
        names = [model.name for model in self._door.models.servable()]
        if self._door.draining or not names:
            why = "this frontend is shutting down" if self._door.draining else "no model can be served now"
            raise Unavailable(why, retry_after_s=1.0)
        await exchange.reply(200, orjson.dumps({"status": "ready", "models": names}))

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST.encode())


def _header_timeout_s(exchange: Exchange) -> float | None:
    """Of the header x-request-timeout."""
    given = exchange.header(b"x-request-timeout")
    try:
        seconds = float(given) if given else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"x-request-timeout is {shown(given)}, and it must be seconds, above 0 and at most {MAX_TIMEOUT_S}",
            param="x-request-timeout",
        )
    return seconds


class _WholeAnswers:
    """A `Listener` that gathers."""

    def __init__(self, choices: int) -> None:
        self.answers = [WholeAnswer() for _ in range(choices)]

    def on_output(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        self.answers[index].texts.append(text)
        self.answers[index].logprobs.extend(logprobs)

    def on_end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        self.answers[index].reason = reason
        self.answers[index].usage = usage

    def sent(self, index: int) -> bool:
        return False

    def on_restart(self, index: int) -> None:
        self.answers[index] = WholeAnswer()


class _StreamedAnswers:
    """A `Listener` that writes events in the pass it is told in."""

    def __init__(self, stream: EventStream, events: Events, choices: int) -> None:
        self._stream = stream
        self._events = events
        self._opened = [False] * choices
        self.usages = [Usage(0, 0)] * choices

    def on_output(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        if not text and not logprobs:
            return
        event = self._events.text(index, text, logprobs)
        if not self._opened[index]:
            self._opened[index] = True
            event = self._events.opening(index) + event
        self._stream.write(event)

    def on_end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        self.usages[index] = usage
        opening = b"" if self._opened[index] else self._events.opening(index)
        self._opened[index] = True
        self._stream.write(opening + self._events.ending(index, reason))

    def sent(self, index: int) -> bool:
        return self._opened[index]

    def on_restart(self, index: int) -> None:
        """Keeps nothing that was not sent."""
