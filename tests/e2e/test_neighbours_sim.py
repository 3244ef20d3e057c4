"""Parts that start in any order find one another, and deployments that share etcd and NATS do not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.embedded import EmbeddedEtcd, EmbeddedNats, free_port
from tests.e2e.command_line import Tokenmill, eventually

_READ = 'tokenmill_kv_handoffs_total{outcome="read"'
_LONG = "The river, the garden and the letter. " * 20
SERVICES = ("decode", "prefill", "router", "frontend", "etcd", "nats")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _answered_remotely(url: str, number: int) -> bool:
    body = {"model": "sim", "prompt": f"{number} {_LONG}", "max_tokens": 1}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False).json()
    except (httpx.TransportError, ValueError):
        return False
    return bool(answer.get("usage", {}).get("tokenmill", {}).get("remote_tokens"))


@pytest.mark.parametrize("order", [SERVICES, SERVICES[::-1]], ids=["etcd and NATS last", "workers last"])
def test_parts_start_in_any_order(order: tuple[str, ...], stack: ExitStack, tmp_path: Path, deployment: str) -> None:
    etcd_port, nats_port, http_port = free_port(), free_port(), free_port()
    flags = ["--etcd", f"127.0.0.1:{etcd_port}", "--nats", f"nats://127.0.0.1:{nats_port}", "--deployment", deployment]
    more = {
        "decode": ["--engine", "sim"], "prefill": ["--engine", "sim"], "router": [],
        "frontend": ["--port", str(http_port)],
    }  # fmt: skip
    for name in order:
        if name in ("etcd", "nats"):
            kind, port = (EmbeddedEtcd, etcd_port) if name == "etcd" else (EmbeddedNats, nats_port)
            stack.callback(kind.start(tmp_path / name, port, durable=False).kill)
            continue
        log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
        process = subprocess.Popen([sys.executable, "-m", f"services.{name}", *flags, *more[name]], stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        _until_listening(process, tmp_path / f"{name}.log")
    numbers = iter(range(1_000_000))
    eventually(lambda: _answered_remotely(f"http://127.0.0.1:{http_port}", next(numbers)))


def _until_listening(process: subprocess.Popen[bytes], log: Path) -> None:
    """So that the next part starts after this one."""
    deadline = time.monotonic() + 60
    while b'"listening"' not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_deployments_that_share_etcd_and_nats_do_not_see_each_other(
    tokenmill: Tokenmill, etcd: str, nats: str, deployment: str
) -> None:
    names = (f"{deployment}-a", f"{deployment}-b")
    shared = ("--etcd", etcd, "--nats", nats)
    urls = []
    for name in names:
        started = tokenmill.run(
            "up", "-d", "--engine", "sim", "--time-scale", "20", "--port", "0", *shared, "--deployment", name
        )
        assert started.returncode == 0, started.stderr
        urls.append(started.stdout.strip())
    first, second = (
        {one["instance_id"]: one for one in _instances(tokenmill, *shared, "--deployment", n)} for n in names
    )
    assert first.keys() & second.keys() == set()
    assert {one["service"] for one in first.values()} == {one["service"] for one in second.values()}
    before = _reads(first), _reads(second)  # `up` itself asks once
    for number in range(5):
        assert _answered_remotely(urls[0], number)
    assert (_reads(first), _reads(second)) == (before[0] + 5, before[1])
    assert tokenmill.run("down", "--deployment", names[0]).returncode == 0
    assert _answered_remotely(urls[1], 0)
    assert tokenmill.run("down", "--deployment", names[1]).returncode == 0


def _instances(tokenmill: Tokenmill, *flags: str) -> list[dict[str, Any]]:
    shown = tokenmill.run("status", "--json", *flags)
    assert shown.returncode == 0, shown.stderr
    return list(json.loads(shown.stdout)["instances"])


def _reads(instances: dict[str, dict[str, Any]]) -> int:
    """Prompts whose KV the decode workers among these have read."""
    total = 0.0
    for one in instances.values():
        if one["role"] == "decode":
            metrics = httpx.get(f"http://{one['metrics_address']}/metrics", trust_env=False).text
            rows = (line.rpartition(" ") for line in metrics.splitlines())
            total += sum(float(value) for name, _, value in rows if name.startswith(_READ))
    return int(total)
