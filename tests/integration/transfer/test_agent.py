"""Two real processes and real NIXL. Where a peer goes silent the path is TCP: over shared memory it cannot delay us."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from transfer import Agent, PeerUnreachable

SIZE = 8 << 20
EXPECTED = np.resize(np.arange(251, dtype=np.uint8), SIZE)
UNTOUCHED = 255


class Peer:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = json.loads(self._line())
        self.metadata = bytes.fromhex(hello["metadata"])
        self.address: int = hello["address"]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    async def notice(self) -> str:
        async with asyncio.timeout(60):
            return str(json.loads(await asyncio.to_thread(self._line))["notice"])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.process.kill()
    peer.process.communicate()


@pytest.fixture
def memory() -> np.ndarray:
    return np.full(SIZE, UNTOUCHED, dtype=np.uint8)


@pytest.fixture
async def agent(memory: np.ndarray) -> AsyncIterator[Agent]:
    agent = await Agent.open(f"reader-{id(memory)}")
    await agent.register([(memory.ctypes.data, memory.nbytes)])
    yield agent
    await agent.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named before `peer` and `agent`: both inherit it."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def whole(memory: np.ndarray, peer: Peer) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((memory.ctypes.data, SIZE), (peer.address, SIZE))]


def touched(memory: np.ndarray) -> int:
    return int((memory != UNTOUCHED).sum())


async def test_a_read_brings_the_peers_bytes_and_tells_the_peer(peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    assert await agent.read(peer.metadata, whole(memory, peer), b"done").within(60)
    assert np.array_equal(memory, EXPECTED)
    assert await peer.notice() == "done"


async def test_the_same_over_tcp(over_tcp: None, peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    assert await agent.read(peer.metadata, whole(memory, peer), b"done").within(60)
    assert np.array_equal(memory, EXPECTED)


async def test_scattered_pieces_land_where_they_belong(peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    pieces = [((memory.ctypes.data + 4096 * (99 - i), 4096), (peer.address + 4096 * 2 * i, 4096)) for i in range(100)]
    assert await agent.read(peer.metadata, pieces, b"done").within(60)
    for i in range(100):
        assert np.array_equal(memory[4096 * (99 - i) :][:4096], EXPECTED[4096 * 2 * i :][:4096])


async def test_a_notice_arrives_without_a_read(peer: Peer, agent: Agent) -> None:
    await agent.notify(peer.metadata, b"never mind")
    assert await peer.notice() == "never mind"


async def test_a_peer_killed_before_the_read_is_unreachable(peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    peer.send(signal.SIGKILL)
    peer.process.wait()
    with pytest.raises(PeerUnreachable):
        await agent.read(peer.metadata, whole(memory, peer), b"done").within(60)


async def test_a_peer_killed_in_the_middle_of_a_read_is_unreachable_and_another_one_is_not(
    over_tcp: None, peer: Peer, memory: np.ndarray, agent: Agent
) -> None:
    peer.send(signal.SIGSTOP)
    read = agent.read(peer.metadata, whole(memory, peer), b"done")
    assert not await read.within(0.3)
    peer.send(signal.SIGKILL)
    with pytest.raises(PeerUnreachable):
        await read.within(60)
    other = Peer()
    try:
        assert await agent.read(other.metadata, whole(memory, other), b"done").within(60)
        assert np.array_equal(memory, EXPECTED)
    finally:
        other.process.kill()
        other.process.communicate()


async def test_an_overdue_read_keeps_its_memory_until_it_has_ended(
    over_tcp: None, peer: Peer, memory: np.ndarray, agent: Agent
) -> None:
    peer.send(signal.SIGSTOP)
    read = agent.read(peer.metadata, whole(memory, peer), b"done")
    assert not await read.within(0.3)
    assert not read.ended.done()
    peer.send(signal.SIGCONT)
    await asyncio.wait_for(read.ended, 10)
    assert np.array_equal(memory, EXPECTED), "it ended because the late bytes have all come"


async def test_a_silent_peer_gets_no_second_read_before_the_first_has_ended(
    over_tcp: None, peer: Peer, memory: np.ndarray, agent: Agent
) -> None:
    peer.send(signal.SIGSTOP)
    read = agent.read(peer.metadata, whole(memory, peer), b"one")
    assert not await read.within(0.3)
    with pytest.raises(PeerUnreachable, match="earlier read"):
        await agent.read(peer.metadata, whole(memory, peer), b"two").within(1)
    peer.send(signal.SIGCONT)
    await asyncio.wait_for(read.ended, 10)
    assert await agent.read(peer.metadata, whole(memory, peer), b"three").within(60)


async def test_no_byte_arrives_after_the_agent_is_closed(
    over_tcp: None, peer: Peer, memory: np.ndarray, agent: Agent
) -> None:
    peer.send(signal.SIGSTOP)
    read = agent.read(peer.metadata, whole(memory, peer), b"done")
    assert not await read.within(0.3)
    await agent.close()
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(read.ended, 60)
    before = touched(memory)
    peer.send(signal.SIGCONT)
    await asyncio.sleep(0.5)  # what must not happen has no event to wait for
    assert touched(memory) == before


async def test_a_closed_agent_refuses(peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    await agent.close()
    with pytest.raises(PeerUnreachable):
        await agent.read(peer.metadata, whole(memory, peer), b"done").within(1)
    with pytest.raises(PeerUnreachable):
        await agent.notify(peer.metadata, b"hello")


async def test_nothing_listens_beyond_loopback(peer: Peer, memory: np.ndarray, agent: Agent) -> None:
    assert await agent.read(peer.metadata, whole(memory, peer), b"done").within(60)
    for process in (psutil.Process(), psutil.Process(peer.process.pid)):
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {"127.0.0.1"}


async def test_an_idle_agent_costs_nothing_and_a_listening_one_little(memory: np.ndarray, agent: Agent) -> None:
    def cpu() -> float:
        times = psutil.Process().cpu_times()
        return float(times.user + times.system)

    async def share(seconds: float) -> float:
        before = cpu()
        await asyncio.sleep(seconds)
        return (cpu() - before) / seconds

    assert await share(2) < 0.02
    agent.listen(True)
    assert await share(2) < 0.05


async def test_an_agent_whose_thread_broke_refuses_instead_of_hanging(agent: Agent, peer: Peer) -> None:
    def break_it() -> None:
        raise RuntimeError("as NIXL does")

    agent._calls.put(break_it)
    agent._thread.join(60)
    async with asyncio.timeout(60):
        with pytest.raises(PeerUnreachable):
            await agent.notify(peer.metadata, b"late")
        with pytest.raises(PeerUnreachable):
            await agent.read(peer.metadata, [], b"").within(60)
