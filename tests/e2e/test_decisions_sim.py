"""What a live router decided under load comes out the same when the simulator decides it again."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.command_line import Tokenmill

TOPICS = [f"{name} " * 120 for name in ("rivers", "mountains", "islands")]


@pytest.mark.parametrize(("policy", "prefill"), [("lmetric", 1), ("linear", 0)])
def test_a_live_suites_decisions_agree_with_the_simulators(
    tokenmill: Tokenmill, tmp_path: Path, policy: str, prefill: int
) -> None:
    log = tmp_path / "decisions.jsonl"
    flags = ("--engine", "sim", "--time-scale", "20", "--port", "0", "--prefill", str(prefill), "--decode", "3")
    running = tokenmill.start("up", *flags, "--policy", policy, "--decisions-log", str(log))
    found = re.search(r"is served at (http://\S+)/v1", running.wait_for("stop "))
    assert found

    def ask(number: int) -> int:
        prompt = f"{TOPICS[number % len(TOPICS)]} and {number // len(TOPICS)}"
        body = {"model": "sim", "prompt": prompt, "max_tokens": 40}
        return httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60, trust_env=False).status_code

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(ask, range(60))) == {200}
    running.send(signal.SIGINT)
    assert running.exit_code() == 0
    replayed = tokenmill.run("simulate", "--replay-decisions", str(log))
    assert replayed.returncode == 0, replayed.stdout
    said = re.search(r"(\d+) comparisons come out the same .* 0 differ, 0 cannot", replayed.stdout)
    assert said, replayed.stdout
    assert int(said[1]) >= 60
