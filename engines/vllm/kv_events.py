"""vLLM's KV events, read as they come and spoken in sequence hashes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq.asyncio
import zmq.error
from zmq.constants import SocketType

from engines.base import KvEventSink
from kvcache.events import Cleared, KvEvent, Removed, Stored
from kvcache.hashing import hash_block, root_hash

__all__ = ["KvEventReader", "Translator"]

_FULL_ATTENTION = frozenset((None, "full_attention", "mla_attention"))
"""Kinds of KV cache group whose blocks stand for whole prefixes. Others (sliding window) forget their beginning."""

_REPLAY_TIMEOUT_MS = 2000
_RESET_PAUSE_S = 1.0
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass(slots=True)
class _Held:
    """A block that the engine holds."""

    sequence_hash: int
    copies: int


class Translator:
    """From one engine's block hashes to sequence hashes. Pure.

    Holds an entry for each distinct block that the engine holds, so the engine's pool bounds it. A block whose parent
    is unknown (its event was lost) has no sequence hash and is left out, as is what follows it.
    """

    def __init__(self, fingerprint: str, block_size: int, seed: int) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._seed = seed
        self._held: dict[Any, _Held] = {}
        self._groups: set[int | None] = {None}

    @property
    def hashes(self) -> set[int]:
        """What the engine holds, by the events so far."""
        return {held.sequence_hash for held in self._held.values()}

    def clear(self) -> Cleared:
        """Forgets everything."""
        self._held.clear()
        return Cleared()

    def translate(self, events: Sequence[dict[str, Any]]) -> list[KvEvent]:
        """One batch of the engine's events, in order. Copies of one block give one Stored and one Removed."""
        out: list[KvEvent] = []
        for event in events:
            match event["type"]:
                case "BlockStored":
                    if event.get("kv_cache_spec_kind") in _FULL_ATTENTION:
                        self._groups.add(event.get("group_idx"))
                        self._store(event, out)
                case "BlockRemoved":
                    if event.get("group_idx") in self._groups and (gone := self._remove(event["block_hashes"])):
                        out.append(Removed(gone))
                case "AllBlocksCleared":
                    out.append(self.clear())
        return out

    def _store(self, event: dict[str, Any], out: list[KvEvent]) -> None:
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        lora = event.get("lora_name")
        first = event["parent_block_hash"]
        parent: int | None = None
        if first is None:
            # Only a prompt's first block carries the salt, as text after the LoRA's name; all others inherit it.
            texts = [key for key in keys[0] or () if isinstance(key, str)][1 if lora else 0 :]
            chain = root_hash(self._fingerprint, lora or "", texts[0] if texts else "", seed=self._seed)
        elif (held := self._held.get(first)) is not None:
            parent = chain = held.sequence_hash
        else:
            return
        tokens = array("I", event["token_ids"])
        run: list[int] = []
        run_parent = parent
        for index, (block_hash, extra) in enumerate(zip(event["block_hashes"], keys, strict=True)):
            block = tokens[index * self._block_size : (index + 1) * self._block_size]
            chain = hash_block(chain, block, self._seed, _extra_bytes(extra))
            if (held := self._held.get(block_hash)) is None:
                self._held[block_hash] = _Held(chain, 1)
                run.append(chain)
                continue
            held.copies += 1
            if run:
                out.append(Stored(run_parent, tuple(run)))
                run = []
            run_parent = chain
        if run:
            out.append(Stored(run_parent, tuple(run)))

    def _remove(self, block_hashes: Sequence[Any]) -> tuple[int, ...]:
        gone = []
        for block_hash in block_hashes:
            if (held := self._held.get(block_hash)) is None:
                continue
            held.copies -= 1
            if held.copies == 0:
                del self._held[block_hash]
                gone.append(held.sequence_hash)
        return tuple(gone)


def _extra_bytes(keys: Sequence[Any] | None) -> bytes:
    """What makes this block differ from one of the same tokens, beyond what the root holds: media and embeddings."""
    return b"" if not keys else b"".join(msgspec.msgpack.encode(key) for key in keys if not isinstance(key, str))


class KvEventReader:
    """Follows the engine's event stream, fills its gaps from the engine's replay ring, and passes it on.

    Always reads: an engine whose queue of events is full stops to compute. Where a gap cannot be filled, everything is
    declared gone and the engine's prefix cache is reset, so that what it holds and what is known of it agree again.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        translator: Translator,
        sink: KvEventSink,
        reset_prefix_cache: Callable[[], Awaitable[bool]],
    ) -> None:
        self._replay_endpoint = replay_endpoint
        self._translator = translator
        self._sink = sink
        self._reset = reset_prefix_cache
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder()
        self._next_seq = 0
        self._reset_owed = False
        self._reset_at = 0.0
        """Not before then is it tried again."""
        self.gaps = 0
        """Times that something was missing from the stream."""

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            if await self._socket.poll(_RESET_PAUSE_S * 1000 if self._reset_owed else None):
                await self._read_one()
            if self._reset_owed and time.monotonic() >= self._reset_at:
                self._reset_owed = not await self._reset()
                self._reset_at = time.monotonic() + _RESET_PAUSE_S

    def clear(self) -> None:
        """Says that all blocks are gone, ahead of the engine, which says so only with its next step."""
        self._sink([self._translator.clear()])

    def close(self) -> None:
        """Frees the sockets. `run` must have ended."""
        self._context.destroy(linger=0)

    async def _read_one(self) -> None:
        _, seq, payload = await self._socket.recv_multipart()
        number = int.from_bytes(seq, "big")
        if number < self._next_seq:
            return  # a replay has brought it already
        if number > self._next_seq:
            await self._fill_gap()
        if number >= self._next_seq:
            self._pass_on(number, payload)

    async def _fill_gap(self) -> None:
        self.gaps += 1
        replay = self._context.socket(SocketType.DEALER)
        try:
            replay.rcvtimeo = _REPLAY_TIMEOUT_MS
            replay.connect(self._replay_endpoint)
            await replay.send_multipart((b"", self._next_seq.to_bytes(8, "big")))
            while True:
                _, _, seq, payload = await replay.recv_multipart()
                if seq == _END_OF_REPLAY:
                    break
                number = int.from_bytes(seq, "big")
                if number > self._next_seq:
                    self._give_up(number)
                if number == self._next_seq:
                    self._pass_on(number, payload)
        except zmq.error.Again:
            self._give_up(self._next_seq)
        finally:
            replay.close(linger=0)

    def _give_up(self, next_seq: int) -> None:
        """Part of the stream is lost for good. The reset waits until no block is in use."""
        self._next_seq = next_seq
        self.clear()
        self._reset_owed = True

    def _pass_on(self, seq: int, payload: bytes) -> None:
        self._next_seq = seq + 1
        if events := self._translator.translate(self._decoder.decode(payload)[1]):
            self._sink(events)
