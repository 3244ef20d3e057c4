from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from engines.vllm.environment import socket_folder


@pytest.mark.parametrize("length", [10, 150])
def test_an_engines_sockets_find_room_however_long_the_temporary_folders_path(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("t" * length)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = socket_folder()
    assert folder.is_dir()
    assert len(f"{folder}/00000000-0000-0000-0000-000000000000") <= 107
    folder.rmdir()
    assert list(temporary.iterdir()) == []
