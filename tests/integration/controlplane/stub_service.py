"""A service for the host's tests, run as a process: `stub_service.py MODE [FLAGS]`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from controlplane.errors import SettingsError
from controlplane.host import Host, run
from controlplane.instances import ModelCard
from controlplane.settings import CommonSettings, load


class StubService:
    """Says on stdout what its host asks of it. `mode` is how it behaves."""

    def __init__(self, mode: str) -> None:
        self.name = "decode" if mode == "worker" else "router"
        self._mode = mode
        self._ticks = 0

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        async def wait(request: bytes, _context: Any) -> bytes:
            await asyncio.sleep(float(request))
            return b"done"

        handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("stub.v1.Stub", handlers)])
        return ["stub.v1.Stub"]

    async def start(self, host: Host) -> ModelCard | None:
        await host.progress("loading weights")
        match self._mode:
            case "load-for-ever":
                await asyncio.Event().wait()
            case "bad-settings":
                raise SettingsError("no such model", param="engine.model")
            case "crash":
                raise RuntimeError("out of memory")
            case "not-yet-able":
                await host.set_ready(False)
                host.spawn(self._able_later(host), "able later")
            case "task-breaks":
                host.spawn(self._break(), "a task")
        return None

    async def _able_later(self, host: Host) -> None:
        await asyncio.sleep(0.5)
        await host.set_ready(True)

    async def _break(self) -> None:
        await asyncio.sleep(0.2)
        raise ValueError("broken task")

    async def drain(self, timeout_s: float) -> None:
        print("drain", flush=True)
        if self._mode == "drain-for-ever":
            await asyncio.Event().wait()

    async def resume(self) -> None:
        print("resume", flush=True)

    def unfinished(self) -> int:
        return 7

    async def stop(self) -> None:
        print("stop", flush=True)

    def failed(self) -> str | None:
        self._ticks += 1
        return "the engine died" if self._mode == "dies" and self._ticks > 1 else None


if __name__ == "__main__":
    common = load({"common": CommonSettings}, sys.argv[2:], {}, prog="stub").get(CommonSettings)
    sys.exit(run(StubService(sys.argv[1]), common))
