"""vLLM's own publisher at one end, our reader at the other: no event is lost unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvcache.events import Cleared, KvEvent, Stored
from tests.integration.engines.vllm_engine.running import DEADLINE_S, eventually

pytestmark = [pytest.mark.vllm]

BLOCK = 4


class Stream:
    """A publisher and a reader of it."""

    def __init__(self, directory: Path, ring: int) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        from engines.vllm.kv_events import KvEventReader, Translator

        endpoints = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        self.publisher = ZmqEventPublisher(0, endpoints[0], endpoints[1], buffer_steps=ring)
        self.events: list[KvEvent] = []
        self.resets = 0
        self.reset_works = True
        self.reader = KvEventReader(*endpoints, Translator("model", BLOCK, 1), self.events.extend, self._reset)
        self.published = 0

    async def _reset(self) -> bool:
        self.resets += 1
        return self.reset_works

    def publish(self, count: int = 1) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        for _ in range(count):
            self.published += 1
            block = BlockStored(
                block_hashes=[self.published],
                parent_block_hash=None,
                token_ids=[self.published] * BLOCK,
                block_size=BLOCK,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
            self.publisher.publish(KVEventBatch(ts=0.0, events=[block]))


@pytest_asyncio.fixture
async def stream(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stream]:
    stream = Stream(tmp_path, getattr(request, "param", 1000))
    reading = asyncio.create_task(stream.reader.run())
    async with asyncio.timeout(DEADLINE_S):
        while not stream.events:  # until the subscription has come through
            stream.publish()
            await asyncio.sleep(0.05)
    await asyncio.to_thread(stream.publisher._event_queue.join)
    await eventually(lambda: len(hashes(stream.events)) == stream.published)
    stream.reader.gaps = 0
    yield stream
    reading.cancel()
    await asyncio.wait([reading])
    stream.reader.close()
    await asyncio.to_thread(stream.publisher.shutdown)


async def miss(stream: Stream, count: int) -> None:
    """Loses batches and notices it with the next one."""
    stream.reader._socket.unsubscribe(b"")
    await asyncio.sleep(0.2)  # the publisher hears of it in its own time, and says nothing
    stream.publish(count)
    await asyncio.to_thread(stream.publisher._event_queue.join)
    stream.reader._socket.subscribe(b"")
    await asyncio.sleep(0.2)
    stream.publish()


def hashes(events: list[KvEvent]) -> list[int]:
    return [block for event in events if isinstance(event, Stored) for block in event.hashes]


async def test_a_gap_is_filled_from_the_engines_ring_in_order(stream: Stream) -> None:
    await miss(stream, 5)
    await eventually(lambda: len(hashes(stream.events)) == stream.published)
    assert not any(isinstance(event, Cleared) for event in stream.events)
    assert (stream.reader.gaps, stream.resets) == (1, 0)
    stream.publish(3)
    await eventually(lambda: len(hashes(stream.events)) == stream.published)
    assert len(set(hashes(stream.events))) == stream.published


@pytest.mark.parametrize("stream", [3], indirect=True)
async def test_a_gap_that_the_ring_no_longer_holds_clears_the_picture_and_resets_the_cache(stream: Stream) -> None:
    stream.reset_works = False
    await miss(stream, 20)
    await eventually(lambda: stream.resets == 1)
    cleared = next(i for i, event in enumerate(stream.events) if isinstance(event, Cleared))
    assert 1 <= len(hashes(stream.events[cleared:])) <= 4
    # Blocks were in use: it is tried again, in its own time, whether or not there is anything to read.
    stream.reset_works = True
    await eventually(lambda: stream.resets == 2)
    stream.publish(3)
    await eventually(lambda: len(hashes(stream.events[cleared:])) >= 4)
    assert stream.resets == 2
