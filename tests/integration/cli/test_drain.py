"""`tokenmill drain` and `undrain` where the instance is not what they expect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from cli.main import main
from controlplane.discovery import Discovery
from controlplane.embedded import free_port
from controlplane.instances import Instance, State

Captured = pytest.CaptureFixture[str]


@pytest.fixture
async def gone(etcd: str, deployment: str) -> AsyncIterator[Instance]:
    """An instance whose record is there and whose process is not."""
    discovery = await Discovery.connect(etcd, deployment, CollectorRegistry(), timeout_s=60)
    address = f"127.0.0.1:{free_port()}"
    instance = Instance("decode", "decode-1", State.READY, time.time_ns(), address, pid=1, host="here", version="0")
    await discovery.register(instance)
    yield instance
    await discovery.deregister()
    await discovery.close()


@pytest.mark.parametrize("command", ["drain", "undrain"])
async def test_one_that_does_not_answer_is_named_with_where_it_should_be(
    command: str, gone: Instance, etcd: str, deployment: str, capsys: Captured
) -> None:
    flags = ["--etcd", etcd, "--deployment", deployment]
    assert await asyncio.to_thread(main, [command, "decode-1", *flags]) == 1
    said = capsys.readouterr().err
    assert f"tokenmill {command}: decode-1 (ready, process 1 on here) does not answer at {gone.address}: " in said


@pytest.mark.parametrize("command", ["drain", "undrain"])
async def test_one_that_nobody_knows_is_refused_with_the_nearest(
    command: str, gone: Instance, etcd: str, deployment: str, capsys: Captured
) -> None:
    flags = ["--etcd", etcd, "--deployment", deployment]
    assert await asyncio.to_thread(main, [command, "decode-7", *flags]) == 1
    said = capsys.readouterr().err
    assert f"deployment '{deployment}' has no instance 'decode-7', or no longer; the nearest is 'decode-1'" in said


async def test_where_nothing_is_registered_that_is_said(etcd: str, deployment: str, capsys: Captured) -> None:
    assert await asyncio.to_thread(main, ["drain", "decode-1", "--etcd", etcd, "--deployment", deployment]) == 1
    assert f"nothing of deployment '{deployment}' is registered" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(text: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drain", "decode-1", f"--timeout={text}"])
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err
