import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.deployment import DeploymentState, RunFolder, running
from controlplane.errors import SettingsError, Unavailable


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def _state(deployment: str) -> DeploymentState:
    return DeploymentState(deployment, pid=1234, etcd="127.0.0.1:2379", nats="nats://127.0.0.1:4222", url="http://x")


def test_a_running_deployment_is_found_by_name() -> None:
    folder = RunFolder.claim("here")
    folder.publish(_state("here"))
    assert running("here") == _state("here")
    assert running("elsewhere") is None
    folder.remove()


def test_a_running_deployment_is_found_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.claim("here")
    folder.publish(_state("here"))
    # As Python does when it could not write into TMPDIR.
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert running("here") == _state("here")
    folder.remove()


def test_two_deployments_live_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    one, two = RunFolder.claim("one"), RunFolder.claim("two")
    one.publish(_state("one"))
    two.publish(_state("two"))
    one.remove()
    assert running("one") is None
    assert running("two") == _state("two")
    two.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_deployment_that_runs_cannot_be_claimed_again() -> None:
    folder = RunFolder.claim("here")
    folder.publish(_state("here"))
    with pytest.raises(Unavailable, match=r"'here' already runs .*pid 1234, http://x.*--deployment"):
        RunFolder.claim("here")
    folder.remove()
    RunFolder.claim("here").remove()


def test_what_a_dead_supervisor_left_is_removed_by_whoever_finds_it(tmp_path: Path) -> None:
    program = """
import os
from controlplane.deployment import DeploymentState, RunFolder
RunFolder.claim("left").publish(DeploymentState("left", os.getpid(), "e", "n"))
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (base,) = tmp_path.iterdir()
    assert (base / "left" / "state.json").exists()
    assert running("left") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a b", "x" * 65])
def test_a_name_that_could_not_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="deployment"):
        RunFolder.claim(name)
