from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from controlplane.bus import Bus
from controlplane.embedded import EmbeddedNats
from controlplane.errors import SettingsError

Until = Callable[..., Awaitable[float]]


@asynccontextmanager
async def connected(url: str, registry: CollectorRegistry | None = None) -> AsyncIterator[Bus]:
    bus = await Bus.connect(url, registry or CollectorRegistry())
    try:
        yield bus
    finally:
        await bus.close()


class Ear:
    """A subscriber that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.gaps = 0

    def on_message(self, subject: str, data: bytes) -> None:
        self.heard.append((subject, data))

    def on_gap(self) -> None:
        self.gaps += 1


async def test_messages_arrive_in_order_at_every_subscriber(nats: str, deployment: str, until: Until) -> None:
    async with connected(nats) as speaker, connected(nats) as listener:
        all_of_it, one_part = Ear(), Ear()
        await listener.subscribe(f"{deployment}.>", all_of_it.on_message, all_of_it.on_gap)
        unsubscribe = await listener.subscribe(f"{deployment}.a", one_part.on_message, one_part.on_gap)
        await asyncio.sleep(0)
        for n in range(1000):
            speaker.publish(f"{deployment}.{'ab'[n % 2]}", n.to_bytes(2, "big"))
        await until(lambda: len(all_of_it.heard) == 1000)
        assert [int.from_bytes(data, "big") for _, data in all_of_it.heard] == list(range(1000))
        assert [subject for subject, _ in one_part.heard] == [f"{deployment}.a"] * 500
        assert all_of_it.gaps == 0
        await unsubscribe()
        speaker.publish(f"{deployment}.a", b"late")
        await until(lambda: len(all_of_it.heard) == 1001)
        assert len(one_part.heard) == 500


async def test_it_comes_back_within_two_seconds_of_a_killed_nats_and_tells_of_the_gap(
    own_nats: EmbeddedNats, until: Until
) -> None:
    registry = CollectorRegistry()
    async with connected(own_nats.endpoint, registry) as bus:
        ear = Ear()
        await bus.subscribe("a", ear.on_message, ear.on_gap)
        for round_ in (1, 2):
            own_nats.kill()
            await until(lambda: not bus.connected)
            assert registry.get_sample_value("tokenmill_bus_connected") == 0
            bus.publish("a", b"lost")
            own_nats.restart()
            await asyncio.to_thread(own_nats.wait_ready)
            await until(lambda: bus.connected, 20)
            assert ear.gaps == round_
            bus.publish("a", b"after")
            await until(lambda: len(ear.heard) == round_)  # noqa: B023
        assert {data for _, data in ear.heard} == {b"after"}
        assert registry.get_sample_value("tokenmill_bus_dropped_messages_total") == 2


async def test_it_need_not_be_there_at_the_start(own_nats: EmbeddedNats, until: Until) -> None:
    own_nats.kill()
    async with connected(own_nats.endpoint) as bus:
        ear = Ear()
        await bus.subscribe("a", ear.on_message, ear.on_gap)
        assert not bus.connected
        own_nats.restart()
        await until(lambda: bus.connected)
        assert ear.gaps == 1
        bus.publish("a", b"x")
        await until(lambda: ear.heard)


async def test_no_tasks_pile_up_while_it_is_away(own_nats: EmbeddedNats, until: Until) -> None:
    own_nats.kill()
    async with connected(own_nats.endpoint) as bus:
        before = len(asyncio.all_tasks())
        await asyncio.sleep(2.0)  # several tries to connect: what is shown is that nothing comes of them
        assert len(asyncio.all_tasks()) <= before + 2
        own_nats.restart()
        await until(lambda: bus.connected)


async def test_a_stopped_nats_blocks_nobody(own_nats: EmbeddedNats, until: Until) -> None:
    async with connected(own_nats.endpoint) as bus:
        own_nats.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        for _ in range(64):
            bus.publish("a", bytes(1 << 20))
        assert time.monotonic() - started < 20
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await bus.subscribe("a", lambda *_: None, lambda: None)
            await bus.close()


FLOOD = """
import asyncio, sys, nats
async def main():
    client = await nats.connect(sys.argv[1])
    for _ in range(200):
        await client.publish("a", bytes(1 << 20))
    await client.flush()
    await client.close()
asyncio.run(main())
"""


async def test_a_subscriber_cut_off_for_being_slow_comes_back_and_is_told(own_nats: EmbeddedNats, until: Until) -> None:
    async with connected(own_nats.endpoint) as bus:
        ear = Ear()
        await bus.subscribe("a", lambda *_: ear.on_message("a", b""), ear.on_gap)
        await bus.subscribe("b", ear.on_message, ear.on_gap)
        # This loop stands still while 200 MiB come: more than the server keeps for a client that does not read.
        subprocess.run([sys.executable, "-c", FLOOD, own_nats.endpoint], check=True)  # noqa: ASYNC221
        await until(lambda: ear.gaps == 2, 30)
        assert len(ear.heard) < 200
        bus.publish("b", b"x")
        await until(lambda: ("b", b"x") in ear.heard)


async def test_a_message_too_large_is_dropped_alone(nats: str, deployment: str, until: Until) -> None:
    registry = CollectorRegistry()
    async with connected(nats, registry) as bus:
        ear = Ear()
        await bus.subscribe(deployment, ear.on_message, ear.on_gap)
        bus.publish(deployment, bytes(9 << 20))
        bus.publish(deployment, b"small")
        await until(lambda: ear.heard)
        assert ear.heard == [(deployment, b"small")]
        assert registry.get_sample_value("tokenmill_bus_dropped_messages_total") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:4222", "http://127.0.0.1:4222", "nats://"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="nats://host:port"):
        await Bus.connect(url, CollectorRegistry())
