"""vLLM's processes: what they cost when idle, what they open, and that they end when they should."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from engines.base import FinishReason, Role, SamplingParams
from engines.vllm.config import VllmConfig
from engines.vllm.engine import VllmEngine
from tests.integration.engines.vllm_engine.prompts import Alone
from tests.integration.engines.vllm_engine.running import (
    DEADLINE_S,
    HASH_SEED,
    START_DEADLINE_S,
    Engines,
    Running,
    eventually,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]

_DRIVER = """
import asyncio, sys
from engines.base import Role
from engines.vllm.config import VllmConfig
from engines.vllm.engine import VllmEngine

async def main():
    config = VllmConfig(model=sys.argv[1], max_model_len=1024, kv_cache_memory_mb=64)
    engine = VllmEngine(config, Role.DECODE, "decode-1", 7)
    await engine.start(lambda events: None, lambda text: None)
    print("started", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_an_idle_engine_uses_next_to_no_cpu(d: Running) -> None:
    """NIXL's progress thread polls without a pause unless told to wait: a whole core for each idle worker."""

    def cpu_s() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in d.processes))

    await asyncio.sleep(0.5)
    before, began = cpu_s(), time.monotonic()
    await asyncio.sleep(3)
    assert (cpu_s() - before) / (time.monotonic() - began) < 0.2


async def test_no_thread_of_a_worker_is_pinned(p: Running, d: Running) -> None:
    """vLLM's connector pins the main thread of every worker to the machine's last core."""
    ours = os.sched_getaffinity(0)
    for process in (*p.processes, *d.processes):
        for thread in process.threads():
            assert os.sched_getaffinity(thread.id) == ours


async def test_nothing_listens_beyond_this_machine(p: Running, d: Running, alone: dict[str, Alone]) -> None:
    case = alone["short"]
    await d.answer(case.prompt, kv=await p.handle(case.prompt))
    for process in (psutil.Process(), *p.processes, *d.processes):
        for connection in process.net_connections(kind="inet"):
            assert connection.laddr.ip in ("127.0.0.1", "::1"), (process.name(), connection)
    listening = [c for process in p.processes for c in process.net_connections() if c.status == "LISTEN"]
    assert listening, "the side channel, at least"


async def test_a_dead_engine_core_fails_the_engine_and_ends_its_requests(d: Running, alone: dict[str, Alone]) -> None:
    assert d.engine.failed() is None
    _, answer = await d.begin(alone["short"].prompt, SamplingParams(max_tokens=900, ignore_eos=True))
    await eventually(lambda: bool(answer.tokens))
    await d.kill()
    assert "engine core" in (d.engine.failed() or "")
    await eventually(answer.ended.is_set)
    assert answer.last.finish is FinishReason.ERROR
    assert answer.last.failure is not None
    assert answer.last.failure.code == "engine_failed"
    with pytest.raises(Exception, match="not running"):
        await d.begin(alone["short"].prompt, SamplingParams(max_tokens=1))


async def test_stopping_ends_every_process_and_takes_its_folder_along(engines: Engines, model: Path) -> None:
    running = await engines.get(Role.DECODE)
    directory = running.engine._directory
    assert directory is not None
    assert directory.is_dir()
    _, answer = await running.begin([5, 6, 7], SamplingParams(max_tokens=900, ignore_eos=True))
    await engines.make_room(2)
    assert answer.last.finish is FinishReason.CANCELLED
    await eventually(lambda: not any(process.is_running() for process in running.processes), deadline_s=20)
    assert not directory.exists()
    await running.engine.stop()


async def test_stopping_while_it_starts_leaves_nothing(engines: Engines, model: Path) -> None:
    await engines.make_room(1)
    config = VllmConfig(model=str(model), kv_cache_memory_mb=64, max_model_len=1024)
    engine = VllmEngine(config, Role.DECODE, "decode-1", HASH_SEED)
    before = set(psutil.Process().children(recursive=True))

    def made() -> list[psutil.Process]:
        return [one for one in set(psutil.Process().children(recursive=True)) - before if one.name().startswith("VLLM")]

    starting = asyncio.create_task(engine.start(lambda events: None, lambda text: None))
    await eventually(made, START_DEADLINE_S)
    processes = made()
    starting.cancel()
    began = time.monotonic()
    await asyncio.wait([starting], timeout=DEADLINE_S)
    assert starting.cancelled()
    assert time.monotonic() - began < 15, "it would load for longer"
    await eventually(lambda: not any(process.is_running() for process in processes))


@pytest.mark.parametrize("when", ["loading", "serving"])
async def test_vllm_does_not_outlive_our_process(when: str, engines: Engines, model: Path, tmp_path: Path) -> None:
    await engines.make_room(1)
    driver = tmp_path / "driver.py"
    driver.write_text(_DRIVER)
    ours = await asyncio.create_subprocess_exec(sys.executable, driver, model, stdout=asyncio.subprocess.PIPE)
    assert ours.stdout is not None

    def cores() -> list[psutil.Process]:
        children = psutil.Process(ours.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("VLLM")]

    if when == "loading":
        await eventually(lambda: len(cores()) >= 1, START_DEADLINE_S)
    else:
        async with asyncio.timeout(START_DEADLINE_S):
            while (line := await ours.stdout.readline()) != b"started\n":
                assert line, "it ended instead"
        assert len(cores()) == 1
    processes = cores()
    # What a terminal sends at Ctrl-C is ours alone to answer.
    await eventually(lambda: os.getpgid(ours.pid) not in [os.getpgid(process.pid) for process in processes])
    ours.kill()
    await ours.wait()
    await eventually(lambda: not any(process.is_running() for process in processes), deadline_s=50)
