"""What every way in shares, HTTP or gRPC: who may come in, how many at once, and running what they asked for."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from controlplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TokenmillError,
    Unauthenticated,
    Unavailable,
)
from services.frontend.answer import Answer, Listener
from services.frontend.dispatch import Dispatcher
from services.frontend.generation import Generation, chat_prompt, make_generations
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models, ServedModel
from services.frontend.openai_errors import ContextLengthExceeded
from services.frontend.openai_requests import Options
from services.frontend.settings import FrontendSettings

__all__ = ["FrontDoor"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETRY_AFTER_S = 1.0
_LONG_TEXT_CHARS = 32_768
"""Longer texts are tokenised in a thread; shorter ones take less than a millisecond or two of the loop's time."""


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
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def authenticate(self, authorization: str) -> None:
        """Holds an Authorization header against the keys, if any are set. Raises `Unauthenticated`."""
        if not self._keys:
            return
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

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Holds room for so many answers. Raises `Overloaded`, or `Unavailable` while draining."""
        if self.draining:
            raise Unavailable("this frontend is shutting down; try another", retry_after_s=_RETRY_AFTER_S)
        if self._running + answers > self.settings.max_concurrent_requests:
            raise Overloaded(
                f"{self._running} answers are in the making, of {self.settings.max_concurrent_requests} there may be; "
                "try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
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

    async def drain(self, timeout_s: float) -> int:
        """Lets nobody in and waits for those inside; returns how many were left when the time was over."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._running

    async def chat(
        self, options: Options, messages: Sequence[dict[str, Any]], arguments: dict[str, Any], trace_id: str
    ) -> list[Generation]:
        """A chat, ready to run. Raises `InvalidRequest` and its kin."""
        model = self.models.find(options.model)
        text = chat_prompt(model, messages, arguments)
        prompt = await _encode(model, text, "messages", add_special_tokens=False)
        return self._make(model, options, [prompt], trace_id, "messages")

    async def complete(self, options: Options, prompts: Sequence[str | array[int]], trace_id: str) -> list[Generation]:
        """Completions, ready to run. Raises `InvalidRequest` and its kin."""
        model = self.models.find(options.model)
        encoded = [
            await _encode(model, prompt, "prompt", add_special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        return self._make(model, options, encoded, trace_id, "prompt")

    async def run(self, generations: Sequence[Generation], listener: Listener) -> None:
        """Makes all answers; returns when they are complete. Raises what ended the first that failed; all end then."""
        deadline = generations[0].deadline
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
                for index, generation in enumerate(generations):
                    answer = Answer(generation, index, listener, self.metrics)
                    tasks.create_task(self._dispatcher.run(answer), name=f"answer {generation.request_id}")
        except* TokenmillError as failed:
            error: TokenmillError | None = _first(failed)
        except* TimeoutError:
            error = DeadlineExceeded("the time allowed for this request is over", param="timeout_s")
        else:
            error = None
        if error is not None:
            raise error

    def _make(
        self, model: ServedModel, options: Options, prompts: Sequence[array[int]], trace_id: str, param: str
    ) -> list[Generation]:
        limit = self.settings.request_timeout_s
        timeout = limit if options.timeout_s is None else min(options.timeout_s, limit)
        return make_generations(
            model,
            options,
            prompts,
            # Clients may use one x-request-id many times at once. Workers must not see one id twice: they would refuse
            # the second, and a cancel of it would end the first.
            request_id=f"{trace_id}-{secrets.token_hex(8)}",
            trace_id=trace_id,
            deadline=asyncio.get_running_loop().time() + timeout,
            param=param,
        )


async def _encode(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> array[int]:
    if len(text) > model.card.max_model_len * model.tokenizer.longest_token:
        # Not tokenised: that may hold everyone up for seconds.
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.card.max_model_len} tokens. However, your {param} has "
            f"{len(text)} characters, which make more tokens than that. Please shorten it.",
            param=param,
        )
    if len(text) <= _LONG_TEXT_CHARS:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _first(group: BaseExceptionGroup[TokenmillError]) -> TokenmillError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
