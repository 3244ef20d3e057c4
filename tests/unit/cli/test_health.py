"""`tokenmill health` against the gRPC server that every service has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cli.main import main
from controlplane.embedded import free_port
from controlplane.listeners import GrpcListener


@pytest.fixture
async def listener() -> AsyncIterator[GrpcListener]:
    listener = GrpcListener()
    yield listener
    await listener.stop()


async def test_it_says_what_the_service_says_of_itself(
    listener: GrpcListener, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{await listener.start('127.0.0.1', 0, [])}"

    assert await asyncio.to_thread(main, ["health", address]) == 1
    await listener.set_serving(True)
    assert await asyncio.to_thread(main, ["health", address]) == 0

    assert capsys.readouterr().out.split() == ["NOT_SERVING", "SERVING"]


async def test_the_port_is_that_of_the_service_it_shares_an_environment_with(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = await listener.start("127.0.0.1", 0, [])
    await listener.set_serving(True)
    monkeypatch.setenv("TOKENMILL_GRPC_PORT", str(port))
    assert await asyncio.to_thread(main, ["health"]) == 0


def test_no_answer_is_a_failure_that_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["health", address, "--timeout", "1"]) == 1
    assert f"tokenmill health: {address}: UNAVAILABLE" in capsys.readouterr().err
