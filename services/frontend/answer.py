"""One answer as it comes: tokens in, text out. The hot path; nothing here awaits.

It outlives its workers. Text, stop strings and counts stand here, so when one worker is lost and another goes on, the
client sees neither. Usage: prompt tokens are the client's prompt, completion tokens all that came, whoever made them;
cached and remote tokens are the last worker's, of the client's prompt.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from controlplane.errors import EngineFailed, TokenmillError, Unavailable
from controlplane.grpc_errors import from_proto
from engines.base import FinishReason, Usage
from services.frontend.detokenizer import Detokenizer
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics
from services.frontend.stage import Stage
from services.frontend.stops import StopStrings
from tokenmill.common.v1 import common_pb2
from tokenmill.decode.v1 import decode_pb2

__all__ = ["Answer", "Listener", "Logprobs"]

Logprobs = Sequence[decode_pb2.PositionLogprobs]
"""One entry a token: the chosen one first, then the best ones."""


class Listener(Protocol):
    """Who is told of an answer, in the same pass that its tokens came in. Must not block nor raise."""

    def on_output(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """New tokens, and the text that became certain with them, which may be none."""

    def on_end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        """After the last output. Not called for an answer that fails."""

    def sent(self, index: int) -> bool:
        """Whether any of it has left already."""

    def on_restart(self, index: int) -> None:
        """Forgets the answer so far, to be told it from the beginning. Only while nothing of it was sent."""


class Answer:
    """Owns what is known of one answer. The decode stream feeds it, the dispatcher awaits `ended`."""

    __slots__ = (
        "_asked",
        "_attempts",
        "_began_at",
        "_detokenizer",
        "_emitted",
        "_end_token_ids",
        "_last_at",
        "_listener",
        "_metrics",
        "_stopped",
        "_stops",
        "carried",
        "completion_tokens",
        "ended",
        "generation",
        "index",
        "on_first_token",
        "on_stop",
        "request_id",
        "stage",
        "ttft_s",
        "usage",
    )

    ended: asyncio.Future[None]
    """Done when the answer is complete, or with the error that ended this worker's part of it."""
    generation: Generation
    """What the worker is asked for: what the client asked for, or what is left of it."""
    carried: int
    """Tokens that earlier workers made."""
    ttft_s: float | None
    """Time to the present worker's first token, once it has come."""
    stage: Stage
    """How far this attempt has come; the dispatcher says so up to the first token."""
    _emitted: array[int]
    """All tokens that came, those with text held back included."""
    _detokenizer: Detokenizer
    _stops: StopStrings | None

    def __init__(self, generation: Generation, index: int, listener: Listener, metrics: FrontendMetrics) -> None:
        self._asked = generation
        self.index = index
        self._listener = listener
        self._metrics = metrics
        self.on_stop: Callable[[], None] = lambda: None
        """Called when a stop string ended the answer before the worker did."""
        self.on_first_token: Callable[[], None] = lambda: None
        eos = () if generation.sampling.ignore_eos else generation.model.card.eos_token_ids
        self._end_token_ids = frozenset((*generation.sampling.stop_token_ids, *eos))
        self._began_at = asyncio.get_running_loop().time()
        self.request_id = generation.request_id
        """Names it on the workers. Another one for every attempt: what is late must not meet what is new."""
        self._attempts = 0
        self._begin()

    @property
    def emitted(self) -> int:
        """Tokens that came, whether or not their text is out."""
        return len(self._emitted)

    @property
    def sent(self) -> bool:
        """Whether the client has any of it."""
        return self._listener.sent(self.index)

    @property
    def age_s(self) -> float:
        """Since it was asked for; of one that goes on, since then."""
        return asyncio.get_running_loop().time() - self._began_at

    def restart(self) -> None:
        """Begins anew, for another worker. Only while nothing of it was sent."""
        self._listener.on_restart(self.index)
        self._begin()

    def resume(self) -> None:
        """Goes on after the tokens that came, for another worker."""
        self.carried = len(self._emitted)
        self.generation = self._asked.after(self._emitted)
        self._began_at = asyncio.get_running_loop().time()
        self._attempt()

    def _begin(self) -> None:
        self.generation = generation = self._asked
        self._emitted = array("I")
        self.carried = 0
        self._detokenizer = generation.model.tokenizer.detokenizer()
        self._stops = StopStrings(generation.stop) if generation.stop else None
        self._stopped = False
        self._last_at = 0.0
        self.completion_tokens = 0
        self.usage = Usage(len(generation.prompt), 0)
        self._attempt()

    def _attempt(self) -> None:
        self._attempts += 1
        if self._attempts > 1:
            self.request_id = f"{self._asked.request_id}.{self._attempts}"
        self.ttft_s = None
        self.stage = Stage.QUEUED
        self.ended = asyncio.get_running_loop().create_future()
        # Whoever awaits it may have gone when it fails; that is no news then.
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def take(self, token_ids: Sequence[int], logprobs: Logprobs, now: float) -> None:
        """New tokens, in the pass over the message they came in."""
        if self._stopped or self.ended.done():
            return
        if self._emitted:
            count = len(token_ids)
            self._metrics.itl.observe((now - self._last_at) / count, count)
        if self.ttft_s is None:
            self.ttft_s = now - self._began_at
            if not self._emitted:
                self._metrics.ttft.observe(self.ttft_s)
            self.stage = Stage.DECODING
            self.on_first_token()
        self._last_at = now
        self._emitted.extend(token_ids)
        if self._stops is not None:
            self._take_until_stop(token_ids, logprobs)
            return
        self.completion_tokens += len(token_ids)
        self._deliver(self._text_of(token_ids), token_ids, logprobs)

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The worker is done with it."""
        if self.ended.done():
            return
        if finished.HasField("usage"):
            prompt = len(self._asked.prompt)
            cached, remote = finished.usage.cached_tokens, finished.usage.remote_tokens
            self.usage = Usage(prompt, self.completion_tokens, min(cached, prompt), min(remote, prompt))
        if self._stopped:
            self._end(FinishReason.STOP)
        elif finished.reason == common_pb2.FINISH_REASON_ERROR:
            self.fail(from_proto(finished.error) if finished.HasField("error") else EngineFailed("the engine failed"))
        elif finished.reason == common_pb2.FINISH_REASON_CANCELLED:
            self.fail(Unavailable("the worker gave the request up before its answer was complete"))
        else:
            self._finish_text(FinishReason(finished.reason))

    def fail(self, error: TokenmillError) -> None:
        """This worker will not go on with it; no matter if all of it has come and only the last word is missing."""
        if self.ended.done():
            return
        if self._stopped:
            self._end(FinishReason.STOP)
        elif (reason := self._reason_to_end()) is not None:
            self._finish_text(reason)
        else:
            self.ended.set_exception(error)

    def _reason_to_end(self) -> FinishReason | None:
        """Why no token can follow those that came, if so."""
        if self._emitted and self._emitted[-1] in self._end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._emitted) >= self._asked.most_tokens else None

    def _take_until_stop(self, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """Token by token, so that usage counts exactly those the text needed."""
        assert self._stops is not None
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self.completion_tokens += 1
            new = self._text_of((token_id,))
            if self.completion_tokens > self._asked.sampling.min_tokens:
                new, self._stopped = self._stops.feed(new)
            text += new
            if self._stopped:
                self._deliver(text, token_ids[:count], logprobs[:count])
                self.on_stop()
                return
        self._deliver(text, token_ids, logprobs)

    def _finish_text(self, reason: FinishReason) -> None:
        """What detokenizer and stop strings kept back is text after all, unless it completes a stop string."""
        text = self._detokenizer.finish()
        if self._stops is not None:
            text, stopped = self._stops.feed(text)
            if stopped:
                reason = FinishReason.STOP
            text += self._stops.finish()
        self._deliver(text, (), ())
        self._end(reason)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if not self._end_token_ids.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._end_token_ids]
        return self._detokenizer.feed(token_ids)

    def _deliver(self, text: str, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        if text or token_ids:
            self._listener.on_output(self.index, text, token_ids, logprobs)

    def _end(self, reason: FinishReason) -> None:
        seen = self.usage
        self.usage = Usage(seen.prompt_tokens, self.completion_tokens, seen.cached_tokens, seen.remote_tokens)
        self.stage = Stage.WRITING
        self.ended.set_result(None)
        self._listener.on_end(self.index, reason, self.usage)
