"""The models that can be served: from what decode workers publish, to a tokenizer ready for use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from controlplane.discovery import Discovery
from controlplane.errors import InvalidRequest, SettingsError, Unavailable
from controlplane.instances import Instance, ModelCard, State
from controlplane.telemetry import get_logger
from kvcache.hashing import root_hash
from services.frontend.fields import shown
from services.frontend.openai_errors import ModelNotFound
from services.frontend.templates import ChatTemplate
from services.frontend.tokenizer import Tokenizer

__all__ = ["Models", "ServedModel"]

_RETRY_LOAD_S = 10.0
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with what turning text into tokens and back needs."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    root: int
    """Parent of the first block's hash."""
    loaded_at: int
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        """The name clients ask for."""
        return self.card.name


class Models:
    """Follows discovery. A model is loaded when its first worker is ready, and kept when its last one is gone.

    Iterating `changes` does the loading; everything else answers at once from the present picture.
    """

    def __init__(
        self, discovery: Discovery, seed: int, is_open: Callable[[str], bool], *, replacement_wait_s: float
    ) -> None:
        self._discovery = discovery
        self._replacement_wait_s = replacement_wait_s
        self._seed = seed
        self._is_open = is_open
        """Whether there is an open stream to the decode worker at this address."""
        self._loaded: dict[str, ServedModel] = {}
        self._changed = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        """Who waits for the next change."""
        self._unserved_since: dict[str, float] = {}
        """In the loop's time; models not in it can be served."""
        self._conflicts: set[str] = set()
        """Instances that serve something else under a name in use, as the log was told."""
        self._log = get_logger(__name__)

    async def changes(self) -> AsyncIterator[bool]:
        """Loads models as they appear, for as long as it is iterated; yields whether any can be served, on change."""
        unsubscribe = self._discovery.subscribe(self.look_again)
        any_before = None
        try:
            while True:
                self._changed.clear()
                failed = await self._load_new()
                if (some := bool(self.servable())) != any_before:
                    yield some
                    any_before = some
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_LOAD_S if failed else None):
                        await self._changed.wait()
        finally:
            unsubscribe()

    def look_again(self) -> None:
        """Instances or streams have changed."""
        for name in self._loaded:
            self._note_served(name)
        self._changed.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, timeout_s: float) -> bool:
        """Waits until instances or streams change. False: they did not in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def unserved_since(self, name: str) -> float | None:
        """Since when no stream is open to any worker of a model, in the loop's time. None: one is."""
        return self._unserved_since.get(name)

    def _note_served(self, name: str) -> None:
        if self._is_served(name):
            self._unserved_since.pop(name, None)
        else:
            self._unserved_since.setdefault(name, asyncio.get_running_loop().time())

    def _is_served(self, name: str) -> bool:
        return any(self._is_open(worker.address) for worker in self._candidates(name))

    def _candidates(self, name: str) -> Iterator[Instance]:
        """Decode workers that serve what is loaded under this name, as far as is known."""
        loaded = self._loaded.get(name)
        for instance in self._discovery.instances.values():
            card = instance.model
            if (
                instance.role == "decode"
                and card is not None
                and card.name == name
                and instance.state in (State.READY, State.SUSPECT)
                and (loaded is None or _same_prompts(loaded.card, card))
            ):
                yield instance

    def servable(self) -> list[ServedModel]:
        """Those that can be served now, by name: to one of their workers at least a stream is open."""
        return [model for name, model in sorted(self._loaded.items()) if self._is_served(name)]

    def workers(self, name: str, usable: Callable[[Instance], bool] = lambda _: True) -> list[Instance]:
        """Decode workers that may take a request for this model, only the most hopeful ones of the usable.

        Best are those with an open stream, also when discovery has not heard of them for a while; then ready ones, then
        quiet ones.
        """
        found = [
            (instance, instance.state is State.READY, self._is_open(instance.address))
            for instance in self._candidates(name)
            if usable(instance)
        ]
        best = max(((is_open, ready) for _, ready, is_open in found), default=None)
        return [instance for instance, ready, is_open in found if (is_open, ready) == best]

    def find(self, name: str) -> ServedModel:
        """The model of this name; an empty name means the only one there is.

        Raises `ModelNotFound`, or `Unavailable` when it is known and nobody has served it for a while.
        """
        if not name:
            servable = self.servable()
            if len(servable) > 1:
                raise InvalidRequest(f"model is empty, and it must be one of: {_names(servable)}", param="model")
            if not servable:
                raise Unavailable("no model is ready to be served yet", retry_after_s=_RETRY_AFTER_S)
            return servable[0]
        model = self._loaded.get(name)
        if model is not None and (self.workers(name) or not self._is_abandoned(name)):
            return model
        if model is not None or any(one.model and one.model.name == name for one in self._decode_instances()):
            raise Unavailable(
                f"no worker can serve the model {name!r} now; try again later",
                param="model",
                retry_after_s=_RETRY_AFTER_S,
            )
        known = _names(self.servable()) or "none"
        raise ModelNotFound(f"The model {shown(name)} does not exist; served now: {known}", param="model")

    def _is_abandoned(self, name: str) -> bool:
        """Whether it has been without a worker for so long that no request waits for one any more."""
        since = self._unserved_since.get(name)
        return since is not None and asyncio.get_running_loop().time() >= since + self._replacement_wait_s

    def _decode_instances(self) -> list[Instance]:
        return [one for one in self._discovery.instances.values() if one.role == "decode"]

    async def _load_new(self) -> bool:
        """Whether one could not be loaded, and so should be tried again."""
        failed = False
        for instance in self._decode_instances():
            card = instance.model
            if card is None or instance.state is not State.READY:
                continue
            loaded = self._loaded.get(card.name)
            if loaded is not None and _same_prompts(loaded.card, card):
                continue
            if loaded is not None and self.workers(card.name):
                if instance.instance_id not in self._conflicts:
                    self._conflicts.add(instance.instance_id)
                    self._log.error(
                        "a worker serves something else under the name of a model in use",
                        model=card.name,
                        instance=instance.instance_id,
                    )
                continue
            try:
                self._loaded[card.name] = await asyncio.to_thread(self._load, card)
                self._note_served(card.name)
            except SettingsError as error:
                failed = True
                self._log.error("model cannot be served", model=card.name, reason=error.message)
        return failed

    def _load(self, card: ModelCard) -> ServedModel:
        tokenizer = Tokenizer.load(card.tokenizer)
        template = ChatTemplate.load(card.tokenizer)
        self._log.info(
            "model loaded",
            model=card.name,
            encodes_with=tokenizer.encodes_with,
            decodes_with=tokenizer.decodes_with,
            chat_template=template is not None,
        )
        return ServedModel(
            card, tokenizer, template, root_hash(card.format.model_fingerprint, seed=self._seed), int(time.time())
        )


def _same_prompts(one: ModelCard, other: ModelCard) -> bool:
    """Whether the same request makes the same tokens and blocks for both."""
    return (
        one.tokenizer == other.tokenizer
        and one.format.model_fingerprint == other.format.model_fingerprint
        and one.format.block_size == other.format.block_size
        and one.max_model_len == other.max_model_len
    )


def _names(models: list[ServedModel]) -> str:
    return ", ".join(model.name for model in models)
