import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from controlplane.child_process import ChildSpec
from controlplane.supervisor import ChildFailed, RestartPolicy, Supervisor

_SLEEP = "import time; time.sleep(60)"
_QUICK = partial(RestartPolicy, first_delay_s=0.01)


def _python(name: str, code: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-IS", "-c", code), stage)


def _supervisor(
    folder: Path,
    *specs: ChildSpec,
    report: Callable[[str, str], None] = lambda name, text: None,
    drain_timeout_s: float = 10.0,
) -> Supervisor:
    return Supervisor(specs, folder, report, drain_timeout_s=drain_timeout_s, restart_policy=_QUICK)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  another process makes it true
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _read_pid(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


async def test_no_child_is_left_after_leaving(tmp_path: Path) -> None:
    async with _supervisor(tmp_path, _python("a", _SLEEP), _python("b", _SLEEP)) as supervisor:
        await _until(lambda: all(_alive(supervisor.pid(name)) for name in "ab"))
        pids = [supervisor.pid(name) for name in "ab"]
    assert not any(_alive(pid) for pid in pids)


async def test_a_killed_child_is_restarted_and_the_reason_told(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    child = _python("worker", f"print('about to serve', flush=True); {_SLEEP}")
    async with _supervisor(tmp_path, child, report=lambda name, text: told.append((name, text))) as supervisor:
        await _until(lambda: "serve" in (tmp_path / "worker.log").read_text() if supervisor.pid("worker") else False)
        first = supervisor.pid("worker")
        supervisor.mark_ready("worker", first)
        os.kill(first, signal.SIGKILL)
        await _until(lambda: supervisor.pid("worker") not in (0, first))
        assert _alive(supervisor.pid("worker"))
    assert told == [("worker", "was killed by SIGKILL (about to serve); restarting in 0.0 s")]


async def test_a_child_that_cannot_start_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = _python("worker", "print('no such model: ./nowhere'); raise SystemExit(1)")
    with pytest.raises(ChildFailed, match=r"(?s)worker cannot start.*exit code 1.*no such model: ./nowhere"):
        async with asyncio.timeout(20), _supervisor(tmp_path, child):
            await asyncio.Event().wait()
    assert (tmp_path / "worker.log").read_text().count("no such model") == 3


async def test_higher_stages_have_ended_before_lower_ones_are_told_to_stop(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = """
import signal, time
def stop(*_):
    time.sleep({delay})
    with open({order!r}, "a") as file: file.write({name!r})
    raise SystemExit
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(60)
"""
    specs = [
        _python(name, code.format(delay=delay, order=str(order), name=name), stage)
        for name, stage, delay in (("low", 0, 0), ("high", 2, 0.3), ("middle", 1, 0.1))
    ]
    async with _supervisor(tmp_path, *specs):
        logs = [tmp_path / f"{spec.name}.log" for spec in specs]
        await _until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    assert order.read_text() == "highmiddlelow"


async def test_a_child_that_will_not_stop_is_killed_with_what_it_started(tmp_path: Path) -> None:
    grandchild = tmp_path / "grandchild"
    told: list[str] = []
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = subprocess.Popen([sys.executable, "-c", {_SLEEP!r}]).pid
open({str(grandchild)!r}, "w").write(str(pid))
time.sleep(60)
"""
    supervisor = _supervisor(
        tmp_path, _python("deaf", code), report=lambda name, text: told.append(text), drain_timeout_s=0.1
    )
    async with supervisor:
        await _until(lambda: _read_pid(grandchild) > 0)
    assert told == ["did not stop in time; killed"]
    await _until(lambda: not _alive(_read_pid(grandchild)))


async def test_kill_cuts_a_stop_short(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    supervisor = _supervisor(tmp_path, _python("deaf", deaf), drain_timeout_s=50)
    started = time.monotonic()
    async with supervisor:
        await _until(lambda: (tmp_path / "deaf.log").exists() and "up" in (tmp_path / "deaf.log").read_text())
        asyncio.get_running_loop().call_later(0.3, supervisor.kill)
    assert time.monotonic() - started < 20


async def test_cancelling_the_owner_stops_the_children_too(tmp_path: Path) -> None:
    pids: list[int] = []

    async def own() -> None:
        async with _supervisor(tmp_path, _python("a", _SLEEP)) as supervisor:
            await _until(lambda: supervisor.pid("a") > 0)
            pids.append(supervisor.pid("a"))
            await asyncio.Event().wait()

    owner = asyncio.create_task(own())
    await _until(lambda: bool(pids))
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert not _alive(pids[0])


async def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from controlplane.child_process import ChildSpec
from controlplane.supervisor import Supervisor
async def main():
    spec = ChildSpec("a", (sys.executable, "-IS", "-c", "print('up', flush=True); {_SLEEP}"))
    folder = Path({str(tmp_path)!r})
    async with Supervisor([spec], folder, lambda name, text: None, drain_timeout_s=1) as supervisor:
        while "up" not in ((folder / "a.log").read_text() if supervisor.pid("a") else ""):
            await asyncio.sleep(0.01)
        print(supervisor.pid("a"), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    assert _alive(child)
    process.kill()
    await process.wait()
    await _until(lambda: not _alive(child))
