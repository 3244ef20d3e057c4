"""A NIXL agent for asyncio: reads other processes' memory, with deadlines, and without burning CPU while idle.

One thread of ours makes every call into NIXL and drives its progress. NIXL's own progress thread is off: it polls at a
fixed pace for ever, where this one sleeps while nothing is in flight and nobody listens. NIXL releases the GIL in its
calls, so the event loop goes on while bytes are copied.

**A read cannot be taken back.** Measured with nixl 1.5.1 over TCP: after `releaseXferReq`, and even after
`invalidateRemoteMD`, the answer of a peer that was merely slow still lands in the destination. So a transfer is
released only once NIXL says that it has ended, and until then (`Read.ended`) its destination must not be reused. A peer
that lets one read run out of time gets no other until that one has ended, so the memory it can tie up is bounded by
what was already in flight.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from transfer.errors import NixlMissing, PeerUnreachable
from transfer.ucx import ucx_environment

__all__ = ["Agent", "Read", "Span"]

T = TypeVar("T")

Span = tuple[int, int]
"""Address and length of a piece of memory."""

_BUSY_S = 0.0002
"""First wait between looks at a transfer in flight; doubles up to the next one."""
_SLOW_S = 0.002
_LISTEN_S = 0.01
"""Longest wait between looks for notices."""
_LINGER_S = 1.0
"""How long a sent notice is given to leave, when nothing else drives progress."""
_CLOSE_S = 10.0
_MOST_PEERS = 1024
"""Connections kept, least recently used dropped first."""


class Read:
    """One transfer in flight into this process's memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once no byte can arrive any more; its exception is `PeerUnreachable`. Only then is the memory free."""
        self.ended.add_done_callback(_retrieve)
        self.overdue = False
        self.peer = ""

    async def within(self, timeout_s: float) -> bool:
        """True when the bytes are here. False: out of time, and they may still come; see `ended`.

        Raises `PeerUnreachable` when the transfer has ended in failure.
        """
        done, _ = await asyncio.wait((self.ended,), timeout=timeout_s)
        if not done:
            self.overdue = True
            return False
        self.ended.result()
        return True


class Agent:
    """Registers memory, reads peers' memory, exchanges notices. Made by `open`; methods are for its event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._log = logging.getLogger(__name__)
        self._on_notice: Callable[[bytes], object] | None = None
        self._listening = False
        self._closed = False
        # The rest belongs to the thread.
        self._nixl: Any = None
        self._agent: Any = None
        self._broken: Any = None
        self._backend: Any = None
        self._registered: list[Any] = []
        self._peers: dict[bytes, str] = {}
        """Names by metadata, least recently used first."""
        self._transfers: dict[Read, Any] = {}
        self._active_until = 0.0
        self._pause_s = _BUSY_S
        self._stopping = False

    @classmethod
    async def open(cls, name: str, host: str = "127.0.0.1") -> Agent:
        """An agent that listens on the interface of `host` and nowhere else. `name` is unique among all peers.

        Raises `NixlMissing`, or `NoSuchInterface` when `host` is not this machine.
        """
        nixl = _bindings()
        os.environ.update(ucx_environment(host, os.environ))
        agent = cls(name, asyncio.get_running_loop())
        agent._thread.start()
        try:
            await agent._call(lambda: agent._create(nixl))
        except BaseException:
            await agent.close()
            raise
        return agent

    async def register(self, spans: Sequence[Span]) -> None:
        """Makes memory readable by peers and usable as a destination. It must outlive the agent."""
        await self._call(lambda: self._register(spans))

    async def metadata(self) -> bytes:
        """What a peer needs to reach this agent and all memory registered so far. A few hundred bytes."""
        return bytes(await self._call(lambda: self._agent.getLocalMD()))

    def read(self, peer: bytes, spans: Sequence[tuple[Span, Span]], notice: bytes) -> Read:
        """Starts to copy the peer's (second) spans into ours (first). `peer` is its metadata.

        The peer gets `notice` after the last byte has been read. The read fails at once when the peer is known to be
        gone or has an overdue read still in flight.
        """
        read = Read(self._loop)
        if self._closed:
            self._settle(read, PeerUnreachable("this agent is closed"))
        else:
            self._calls.put(lambda: self._start_read(read, peer, spans, notice))
        return read

    async def notify(self, peer: bytes, notice: bytes) -> None:
        """Sends a notice; its arrival is not confirmed. Raises `PeerUnreachable` when the peer is known to be gone."""
        await self._call(lambda: self._notify(peer, notice))

    def on_notice(self, callback: Callable[[bytes], object]) -> None:
        """Who is told of peers' notices, on the event loop."""
        self._on_notice = callback

    def listen(self, listening: bool) -> None:
        """Whether notices are expected. While not, the agent sleeps and they wait."""
        if listening != self._listening:
            self._listening = listening
            self._calls.put(self._wake)

    async def close(self) -> None:
        """Ends the agent, within 10 s; no byte arrives after it. Safe to call twice.

        Reads in flight end in `PeerUnreachable`.
        """
        if not self._closed:
            self._closed = True
            self._calls.put(self._stop)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    async def _call(self, function: Callable[[], T]) -> T:
        if self._closed:
            raise PeerUnreachable("this agent is closed")
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, future, result)

        self._calls.put(run)
        return await future

    # Below: on the thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._destroy()
        except Exception:
            # Nobody may wait for a thread that is no more: what is asked of this agent from now on is refused, and
            # what was asked before fails here. Bytes may still arrive, so no read in flight ends, and NIXL's agent is
            # kept: with it would go the memory of its transfers.
            self._log.exception("NIXL broke; this agent moves no more KV")
            self._closed = True
            self._broken, self._agent = self._agent, None
            while not self._calls.empty():
                self._calls.get()()

    def _turn(self) -> None:
        try:
            call = self._calls.get(timeout=self._patience_s())
        except queue.Empty:
            pass
        else:
            call()
        if self._agent is not None and not self._stopping:
            self._progress()

    def _patience_s(self) -> float | None:
        """How long to sleep unless called; None: for ever."""
        if self._transfers or time.monotonic() < self._active_until:
            longest = _SLOW_S
        elif self._listening:
            longest = _LISTEN_S
        else:
            return None
        self._pause_s = min(self._pause_s * 2, longest)
        return self._pause_s

    def _wake(self) -> None:
        self._pause_s = _BUSY_S

    def _create(self, nixl: Any) -> None:
        self._nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = False
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        try:
            agent = nixl.nixlAgent(self.name, config)
            self._backend = agent.createBackend("UCX", {})
        except Exception as error:
            raise NixlMissing(f"NIXL cannot start its UCX backend here: {error}") from error
        self._agent = agent

    def _register(self, spans: Sequence[Span]) -> None:
        nixl = self._nixl
        regions = nixl.nixlRegDList(nixl.DRAM_SEG, [(address, length, 0, "") for address, length in spans])
        self._agent.registerMem(regions, [self._backend])
        self._registered.append(regions)

    def _peer(self, metadata: bytes) -> str:
        name = self._peers.pop(metadata, None)
        if name is None:
            if len(self._peers) >= _MOST_PEERS:
                self._forget_peer(next(iter(self._peers.values())))
            try:
                name = _text(self._agent.loadRemoteMD(metadata))
            except Exception as error:
                raise PeerUnreachable(f"cannot reach the peer: {error}") from error
        self._peers[metadata] = name
        return name

    def _forget_peer(self, name: str) -> None:
        """Drops the connection, so that the next use makes a new one; not while a transfer needs it."""
        if any(read.peer == name for read in self._transfers):
            return
        self._peers = {metadata: known for metadata, known in self._peers.items() if known != name}
        self._agent.invalidateRemoteMD(name)

    def _start_read(self, read: Read, peer: bytes, spans: Sequence[tuple[Span, Span]], notice: bytes) -> None:
        nixl = self._nixl
        try:
            read.peer = self._peer(peer)
            if any(other.overdue for other in self._transfers if other.peer == read.peer):
                raise PeerUnreachable("it has not answered an earlier read yet")
            into = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, length, 0) for (address, length), _ in spans])
            source = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, length, 0) for _, (address, length) in spans])
            transfer = self._agent.createXferReq(nixl.NIXL_READ, into, source, read.peer, notice, [self._backend])
        except Exception as error:
            if read.peer:
                self._forget_peer(read.peer)
            self._loop.call_soon_threadsafe(self._settle, read, error)
            return
        self._transfers[read] = transfer
        self._wake()
        self._look(read, lambda: self._agent.postXferReq(transfer, notice))

    def _look(self, read: Read, state_of: Callable[[], Any]) -> None:
        try:
            state = state_of()
        except Exception as error:
            self._end(read, error)
        else:
            if state != self._nixl.NIXL_IN_PROG:
                self._end(read, None)

    def _notify(self, metadata: bytes, notice: bytes) -> None:
        name = self._peer(metadata)
        try:
            self._agent.genNotif(name, notice)
        except Exception as error:
            self._forget_peer(name)
            raise PeerUnreachable(f"agent {name} cannot be told: {error}") from error
        self._active_until = time.monotonic() + _LINGER_S
        self._wake()

    def _progress(self) -> None:
        for read, transfer in list(self._transfers.items()):
            self._look(read, partial(self._agent.getXferStatus, transfer))
        notices = [notice for from_peer in self._agent.getNotifs({}).values() for notice in from_peer]
        if notices:
            self._wake()
            self._loop.call_soon_threadsafe(self._deliver, notices)

    def _end(self, read: Read, error: Exception | None) -> None:
        """NIXL is done with a transfer: only now may it be released."""
        self._agent.releaseXferReq(self._transfers.pop(read))
        if error is not None:
            self._forget_peer(read.peer)
        self._loop.call_soon_threadsafe(self._settle, read, error)

    def _stop(self) -> None:
        self._stopping = True

    def _destroy(self) -> None:
        if self._agent is None:
            return
        for read in list(self._transfers):
            self._end(read, PeerUnreachable("this agent was closed"))
        for regions in self._registered:
            self._agent.deregisterMem(regions, [self._backend])
        self._agent = self._backend = None

    # Below: on the event loop again.

    def _settle(self, read: Read, error: Exception | None) -> None:
        if error is None:
            read.ended.set_result(None)
        else:
            read.ended.set_exception(PeerUnreachable(f"agent {read.peer} was lost: {error}"))

    def _deliver(self, notices: Sequence[bytes]) -> None:
        if self._on_notice is not None:
            for notice in notices:
                self._on_notice(notice)


def _bindings() -> Any:
    """NIXL's C++ bindings. The Python wrapper on top of them fixes the pace of progress and adds nothing we use."""
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise NixlMissing(f"{package} is broken: {error}") from error
        except ImportError as error:
            raise NixlMissing(f"{package} cannot be loaded: {error}") from error
    raise NixlMissing("NIXL is not installed; KV transfers need it: pip install 'tokenmill[nixl]'")


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _retrieve(future: asyncio.Future[None]) -> None:
    """An overdue read may end with nobody waiting; that is no error of the program."""
    if not future.cancelled():
        future.exception()


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
