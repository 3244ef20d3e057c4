import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from controlplane.child_process import ChildSpec
from controlplane.errors import NotFound, Unavailable
from controlplane.kept_child import ChildState
from controlplane.restart_policy import RestartPolicy
from controlplane.supervisor import ChildFailed, Supervisor

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


def _service(name: str, code: str = _SLEEP) -> ChildSpec:
    env = {"TOKENMILL_INSTANCE_ID": f"{name}-abc"}
    return ChildSpec(name, (sys.executable, "-IS", "-c", code), instance_id=f"{name}-abc", env=env)


async def _ready(supervisor: Supervisor, instance_id: str) -> int:
    """Waits for its process and says that it works, as discovery would."""
    await _until(lambda: instance_id in supervisor.pids())
    name, pid = supervisor.pids()[instance_id]
    supervisor.mark_ready(name, pid)
    return pid


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  another process makes it true
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


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
        async with asyncio.timeout(60), _supervisor(tmp_path, child):
            await asyncio.Event().wait()
    assert (tmp_path / "worker.log").read_text().count("no such model") == 3


async def test_a_child_that_was_asked_to_go_stays_down_until_it_is_asked_back(tmp_path: Path) -> None:
    told: list[str] = []
    code = (
        f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); {_SLEEP}"
    )
    async with _supervisor(tmp_path, _service("a", code), report=lambda _, text: told.append(text)) as supervisor:
        first = await _ready(supervisor, "a-abc")
        await _until(lambda: "up" in (tmp_path / "a.log").read_text())
        os.kill(first, signal.SIGTERM)
        await _until(lambda: supervisor.children()[0].state is ChildState.STOPPED)
        assert told == ["was asked to go; `tokenmill restart a` brings it back"]
        assert supervisor.pid("a") == 0
        back = asyncio.create_task(supervisor.restart("a"))
        assert await _ready(supervisor, "a-abc") != first
        child = await back
        assert (child.state, child.instance_id) == (ChildState.RUNNING, "a-abc")


async def test_a_child_restarts_in_place_under_its_own_name(tmp_path: Path) -> None:
    up = tmp_path / "up"
    code = f"open({str(up)!r}, 'a').write('x'); {_SLEEP}"
    spec = ChildSpec("server", (sys.executable, "-IS", "-c", code), answers=up.exists)
    async with _supervisor(tmp_path, spec) as supervisor, asyncio.timeout(60):
        await supervisor.until_ready("server")
        first = supervisor.pid("server")
        child = await supervisor.restart("server", successor_first=True)  # it is no service, and has no successor
        assert child.pid not in (0, first)
        assert not _alive(first)


async def test_a_service_goes_when_its_successor_is_ready(tmp_path: Path) -> None:
    code = f"import os; print(os.environ['TOKENMILL_INSTANCE_ID'], flush=True); {_SLEEP}"
    async with _supervisor(tmp_path, _service("a", code)) as supervisor:
        for first_id, next_id in (("a-abc", "a-abc-2"), ("a-abc-2", "a-abc-3")):
            await _until(lambda: first_id in _read(tmp_path / "a.log"))  # noqa: B023  over when the loop goes on
            first = await _ready(supervisor, first_id)
            following = asyncio.create_task(supervisor.restart("a", successor_first=True))
            await _until(lambda: next_id in _read(tmp_path / "a.log"))  # noqa: B023  over when the loop goes on
            assert _alive(first)
            assert supervisor.pid("a") == first, "it counts until the other one is ready"
            second = await _ready(supervisor, next_id)
            child = await following
            assert (child.pid, child.instance_id) == (second, next_id)
            assert not _alive(first)
    assert (tmp_path / "a.log").read_text().split() == ["a-abc", "a-abc-2", "a-abc-3"]
    assert not _alive(second)


async def test_a_service_goes_on_when_its_successor_fails(tmp_path: Path) -> None:
    good, up = tmp_path / "good", tmp_path / "up"
    good.touch()
    code = f"import pathlib; assert pathlib.Path({str(good)!r}).exists(), 'bad disk'; open({str(up)!r}, 'w'); {_SLEEP}"
    async with _supervisor(tmp_path, _service("a", code)) as supervisor:
        first = await _ready(supervisor, "a-abc")
        await _until(up.exists)
        good.unlink()
        with pytest.raises(Unavailable, match=r"(?s)a cannot start.*bad disk"):
            await supervisor.restart("a", successor_first=True)
        assert _alive(first)
        assert supervisor.pids() == {"a-abc": ("a", first)}


async def test_an_unknown_child_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    async with _supervisor(tmp_path, _service("decode-1")) as supervisor:
        with pytest.raises(NotFound, match="nearest is 'decode-1'"):
            await supervisor.restart("decode1")


async def test_a_child_is_given_a_socket_that_outlives_it(tmp_path: Path) -> None:
    program = """
import os, socket
assert os.environ["LISTEN_PID"] == str(os.getpid()) and os.environ["LISTEN_FDS"] == "1"
server = socket.socket(fileno=3)
server.setblocking(True)
for fd in (4, 5, 6, 7, 8, 9):
    try: os.fstat(fd)
    except OSError: continue
    raise SystemExit(f"{fd} was inherited, too")
while True:
    client, _ = server.accept()
    client.sendall(str(os.getpid()).encode())
    client.close()
"""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        spec = ChildSpec("a", (sys.executable, "-IS", "-c", program), sockets=(listening.fileno(),))

        async def asked() -> int:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                answer = int(await reader.read())
                writer.close()
                return answer

        async with _supervisor(tmp_path, spec) as supervisor:
            first = await asked()
            assert first == supervisor.pid("a")
            os.kill(first, signal.SIGKILL)
            await _until(lambda: not _alive(first))
            assert await asked() == supervisor.pid("a") != first, "who comes meanwhile waits"


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
