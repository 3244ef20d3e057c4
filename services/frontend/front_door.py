"""What every way in shares, HTTP or gRPC: who may come in, how many at once, and running what they asked for."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from controlplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TokenmillError,
    Unauthenticated,
)
from services.frontend.answer import Answer, Listener
from services.frontend.dispatch import Dispatcher
from services.frontend.generation import Generation, chat_prompt, make_generations
from services.frontend.intake import Bodies, LongWork
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models, ServedModel
from services.frontend.openai_errors import ContextLengthExceeded
from services.frontend.openai_requests import Options
from services.frontend.routing import key_tenant
from services.frontend.settings import FrontendSettings
from services.frontend.stage import Stage

__all__ = ["FrontDoor"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETRY_AFTER_S = 1.0
_MESSAGE_CHARS = 64
"""A message of a chat takes as long to render as so many characters to tokenise, roughly."""


class FrontDoor:
    """Owns the bounds of one frontend: keys, requests at once, draining."""

    def __init__(
        self, settings: FrontendSettings, models: Models, dispatcher: Dispatcher, metrics: FrontendMetrics
    ) -> None:
        self.settings = settings
        self.models = models
        self.metrics = metrics
        self._dispatcher = dispatcher
        self._keys = [key.strip().encode() for key in settings.api_keys.split(",") if key.strip()]
        self.bodies = Bodies(settings.max_bodies_mb << 20)
        self.long_work = LongWork()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Load balancers are told to send nobody here."""

    def authenticate(self, authorization: str) -> str:
        """Holds an Authorization header against the keys; returns the key's tenant. Raises `Unauthenticated`.

        Without keys everybody may come in, and the tenant is empty.
        """
        if not self._keys:
            return ""
        scheme, _, key = authorization.partition(" ")
        if not key:
            raise Unauthenticated(
                "no API key was sent; send the header 'Authorization: Bearer KEY'", param="authorization"
            )
        sent = key.strip().encode()
        # Every key is compared, and each in constant time: how long it takes tells nothing.
        known = [hmac.compare_digest(sent, one) for one in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthenticated("Incorrect API key provided; check the key", param="authorization")
        return key_tenant(sent)

    @staticmethod
    def trace_id(given: str) -> str:
        """The client's own x-request-id, or a new one. Raises `InvalidRequest` for one that cannot travel."""
        if not given:
            return secrets.token_hex(16)
        if not _REQUEST_ID.fullmatch(given):
            raise InvalidRequest(
                "x-request-id may have 1 to 128 letters, digits and the characters . _ : -", param="x-request-id"
            )
        return given

    def deadline(self, arrived_at: float, *timeouts_s: float | None) -> float:
        """When a request that came then must be over, in the loop's time: the shortest of its timeouts and ours."""
        given = [timeout for timeout in timeouts_s if timeout is not None]
        return arrived_at + min([self.settings.request_timeout_s, *given])

    def check_room(self, answers: int = 1) -> None:
        """Raises `Overloaded` without room for so many answers.

        Not while draining: who still finds the way here has not been told of another one yet.
        """
        if self._running + answers > self.settings.max_concurrent_requests:
            raise Overloaded(
                f"{self._running} answers are in the making, of {self.settings.max_concurrent_requests} there may be; "
                "try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Holds room for so many answers. Raises as `check_room` does."""
        self.check_room(answers)
        self._running += answers
        self._idle.clear()
        self.metrics.running.inc(answers)
        try:
            yield
        finally:
            self._running -= answers
            self.metrics.running.dec(answers)
            if not self._running:
                self._idle.set()

    @property
    def running(self) -> int:
        """Answers in the making."""
        return self._running

    async def empty(self) -> None:
        """Waits until no answer is in the making."""
        await self._idle.wait()

    async def chat(
        self,
        options: Options,
        messages: Sequence[dict[str, Any]],
        arguments: dict[str, Any],
        trace_id: str,
        deadline: float,
    ) -> list[Generation]:
        """A chat, ready to run. Raises `InvalidRequest` and its kin."""
        model = self.models.find(options.model)
        length = sum(len(message["content"]) for message in messages) + _MESSAGE_CHARS * len(messages)

        def render_and_encode() -> array[int]:
            return _encode(model, chat_prompt(model, messages, arguments), "messages", add_special_tokens=False)

        async with self._preparing(deadline, options.n):
            prompt = await self.long_work.run(length, render_and_encode)
        return self._make(model, options, [prompt], trace_id, deadline, "messages")

    async def complete(
        self, options: Options, prompts: Sequence[str | array[int]], trace_id: str, deadline: float
    ) -> list[Generation]:
        """Completions, ready to run. Raises `InvalidRequest` and its kin."""
        model = self.models.find(options.model)
        encoded: list[array[int]] = []
        async with self._preparing(deadline, len(prompts) * options.n):
            for prompt in prompts:
                if isinstance(prompt, str):
                    prompt = await self.long_work.run(
                        len(prompt), _encode, model, prompt, "prompt", add_special_tokens=True
                    )
                encoded.append(prompt)
        return self._make(model, options, encoded, trace_id, deadline, "prompt")

    async def run(self, generations: Sequence[Generation], listener: Listener) -> None:
        """Makes all answers; returns when they are complete. Raises what ended the first that failed; all end then.

        Cancelled, by a client that has gone, it stops all work for them and counts how far each had come.
        """
        answers = [Answer(one, index, listener, self.metrics) for index, one in enumerate(generations)]
        try:
            await self._run_all(answers, generations[0].deadline)
        except asyncio.CancelledError:
            for answer in answers:
                self.count_cancelled(answer.stage)
            raise

    async def _run_all(self, answers: Sequence[Answer], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
                for answer in answers:
                    tasks.create_task(self._dispatcher.run(answer), name=f"answer {answer.request_id}")
        except* TokenmillError as failed:
            error: TokenmillError | None = _first(failed)
        except* TimeoutError:
            error = _time_is_over()
        else:
            error = None
        if error is not None:
            raise error

    def count_cancelled(self, stage: Stage, answers: int = 1) -> None:
        """Their client has gone, or does not read."""
        self.metrics.cancelled.labels(stage).inc(answers)

    @asynccontextmanager
    async def _preparing(self, deadline: float, answers: int) -> AsyncIterator[None]:
        """Until the prompt is tokens."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise _time_is_over() from None
        except asyncio.CancelledError:
            self.count_cancelled(Stage.TOKENISING, answers)
            raise

    def _make(
        self,
        model: ServedModel,
        options: Options,
        prompts: Sequence[array[int]],
        trace_id: str,
        deadline: float,
        param: str,
    ) -> list[Generation]:
        return make_generations(
            model,
            options,
            prompts,
            # Clients may use one x-request-id many times at once. Workers must not see one id twice: they would refuse
            # the second, and a cancel of it would end the first.
            request_id=f"{trace_id}-{secrets.token_hex(8)}",
            trace_id=trace_id,
            deadline=deadline,
            param=param,
        )


def _encode(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> array[int]:
    if len(text) > model.card.max_model_len * model.tokenizer.longest_token:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.card.max_model_len} tokens. However, your {param} has "
            f"{len(text)} characters, which make more tokens than that. Please shorten it.",
            param=param,
        )
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _time_is_over() -> DeadlineExceeded:
    return DeadlineExceeded("the time allowed for this request is over", param="timeout_s")


def _first(group: BaseExceptionGroup[TokenmillError]) -> TokenmillError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
