from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.vllm.environment import socket_folder


@pytest.fixture
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, with a path of about this length."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    folder = base / ("t" * request.param)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(base)


@pytest.mark.parametrize("temporary", [4, 150], indirect=True)
def test_an_engines_sockets_find_room_however_long_the_temporary_folders_path(temporary: Path) -> None:
    folder, lock = socket_folder()
    assert len(f"{folder}/00000000-0000-0000-0000-000000000000") <= 107
    os.close(lock)
    folder.rmdir()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("temporary", [4], indirect=True)
def test_what_a_killed_engine_left_goes_when_the_next_one_starts_and_a_living_ones_stays(temporary: Path) -> None:
    living, lives = socket_folder()
    killed, lock = socket_folder()
    (killed / "socket").touch()
    os.close(lock)  # as its death does
    folder, lock = socket_folder()
    assert set(temporary.iterdir()) == {living, folder}
    os.close(lock)
    os.close(lives)
