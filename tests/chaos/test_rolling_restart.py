"""`tokenmill restart --rolling` under load: no request is lost, and no text of any is wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.chaos.asks import MIXED, asks
from cli.chaos.checker import LEAVING, Verdict
from cli.chaos.clients import Client
from cli.chaos.load import Load
from cli.chaos.sim_answers import SimAnswers
from cli.chaos.suite import Part
from tests.e2e.command_line import Tokenmill

_RESTART_TIMEOUT_S = 600.0
"""Ten times what is expected."""


@pytest.fixture
def frontend(tokenmill: Tokenmill, tmp_path: Path) -> Iterator[Part]:
    """Of a deployment with two workers a role. Its logs stay in the test's folder."""
    started = tokenmill.run("up", "-d", "--engine", "sim", "--port", "0", "--prefill", "2", "--decode", "2")
    assert started.returncode == 0, started.stderr
    instances = json.loads(tokenmill.run("status", "--json").stdout)["instances"]
    (one,) = (one for one in instances if one["service"] == "frontend")
    http_port, grpc_port, metrics_port = (
        int(one[key].rpartition(":")[2]) for key in ("http_address", "address", "metrics_address")
    )
    yield Part("frontend", "frontend", grpc_port, metrics_port, http_port)
    for log in tokenmill.folder.glob("*/default/logs/*"):
        shutil.copy(log, tmp_path)
    stopped = tokenmill.run("down")
    assert stopped.returncode == 0, stopped.stderr
    tokenmill.assert_nothing_left()


async def test_a_rolling_restart_of_every_service_loses_no_request(tokenmill: Tokenmill, frontend: Part) -> None:
    async with Client(frontend, "sim") as client:
        load = Load([client], asks(1, MIXED), SimAnswers(0), 8.0, lambda *_: {LEAVING})
        async with load.running():
            restarted = await asyncio.to_thread(tokenmill.run, "restart", "--rolling", timeout_s=_RESTART_TIMEOUT_S)
    assert restarted.returncode == 0, restarted.stderr
    assert len(load.records) > 10
    bad = Counter(
        (record.judgement.verdict, record.judgement.why)
        for record in load.records
        if record.judgement.verdict not in (Verdict.RIGHT, Verdict.CANCELLED)
    )
    assert not bad, bad
