"""KV blocks from one simulated engine to another: described where they are held, read and verified where they are used.

The reader trusts nothing but what it checks after the last byte: the lease must still run then (by the reader's clock,
from when the handle came), each digest must fit the bytes, and the bytes must be those of the block's sequence hash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engines.base import Handle, KvOutcome
from engines.sim.kv_memory import KvMemory
from transfer import Agent, PeerUnreachable, Read, digest

__all__ = ["Handoff", "Offer", "Reception"]


_LATE_READS_S = 30.0


class Offer(msgspec.Struct, frozen=True):
    """What a reader must know of held blocks; travels in `Handle.engine_params`."""

    agent: bytes
    """Metadata of the holder's transfer agent."""
    address: int
    """Of its region."""
    blocks: tuple[int, ...]
    """Their numbers in it, in order."""


@dataclass(frozen=True, slots=True)
class Reception:
    """How a read went. While `unfinished` is set and has not ended, its destination must not be reused."""

    outcome: KvOutcome
    unfinished: Read | None = None


class Handoff:
    """One engine's side of it, either side. Made by `open`."""

    def __init__(self, agent: Agent, memory: KvMemory, read_timeout_s: float, metadata: bytes) -> None:
        self._agent = agent
        self._memory = memory
        self._read_timeout_s = read_timeout_s
        self._metadata = metadata
        self._deaf: asyncio.TimerHandle | None = None
        """When the agent no longer listens."""

    @classmethod
    async def open(cls, name: str, host: str, memory: KvMemory, read_timeout_s: float) -> Handoff:
        """Raises `TransferError` when no transfer can be had here."""
        agent = await Agent.open(name, host)
        await agent.register([memory.span])
        return cls(agent, memory, read_timeout_s, await agent.metadata())

    async def close(self) -> None:
        """Ends all transfers."""
        self._stop_timer()
        await self._agent.close()

    # The holder

    def offer(self, blocks: Sequence[int]) -> tuple[bytes, tuple[bytes, ...]]:
        """Engine parameters and digests of these blocks, for a handle."""
        offer = Offer(self._metadata, self._memory.span[0], tuple(blocks))
        return msgspec.msgpack.encode(offer), tuple(digest(self._memory.view(block)) for block in blocks)

    def on_read(self, callback: Callable[[str], object]) -> None:
        """Who is told the id of each handle that was read or is not wanted."""
        self._agent.on_notice(lambda notice: callback(notice.decode()))

    def expect_reads(self, expected: bool) -> None:
        """Whether any handle is out. Reads that are late all the same come to their end: readers wait for that."""
        if expected:
            self._stop_timer()
            self._agent.listen(True)
        elif self._deaf is None:
            self._deaf = asyncio.get_running_loop().call_later(_LATE_READS_S, self._agent.listen, False)

    def _stop_timer(self) -> None:
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    # The reader

    def accept(self, handle: Handle) -> Offer | None:
        """The offer in a handle; None when it makes no sense here."""
        try:
            offer = msgspec.msgpack.decode(handle.engine_params, type=Offer)
        except msgspec.MsgspecError:
            return None
        fits = len(offer.blocks) == len(handle.digests) == handle.tokens // handle.format.block_size
        return offer if fits else None

    async def read(
        self, handle: Handle, offer: Offer, first: int, blocks: Sequence[int], hashes: Sequence[int], delay_s: float = 0
    ) -> Reception:
        """Copies the handle's blocks, from number `first` on, into `blocks`; these should have these hashes.

        `delay_s` is for tests of late reads.
        """
        await asyncio.sleep(delay_s)
        lease_ends = handle.received_at + handle.lease_s
        left_s = lease_ends - time.monotonic()
        if left_s <= 0 and not delay_s:
            return Reception(KvOutcome.LATE)
        size = self._memory.block_bytes
        wanted = slice(first, first + len(blocks))
        spans = [
            ((self._memory.span[0] + ours * size, size), (offer.address + theirs * size, size))
            for ours, theirs in zip(blocks, offer.blocks[wanted], strict=True)
        ]
        read = self._agent.read(offer.agent, spans, handle.handle_id.encode())
        try:
            arrived = await read.within(self._read_timeout_s if delay_s else min(self._read_timeout_s, left_s))
        except PeerUnreachable:
            return Reception(KvOutcome.UNREACHABLE)
        if time.monotonic() >= lease_ends:
            return Reception(KvOutcome.LATE, None if arrived else read)
        if not arrived:
            return Reception(KvOutcome.UNREACHABLE, read)
        right = all(
            digest(self._memory.view(block)) == expected and self._memory.has(block, block_hash)
            for block, expected, block_hash in zip(blocks, handle.digests[wanted], hashes, strict=True)
        )
        return Reception(KvOutcome.READ if right else KvOutcome.CORRUPT)

    async def decline(self, handle: Handle, offer: Offer) -> None:
        """Lets the holder free blocks that are not wanted. Best effort: the lease's end does it too."""
        try:
            await self._agent.notify(offer.agent, handle.handle_id.encode())
        except PeerUnreachable:
            return
