from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command_line import Tokenmill


@pytest.fixture
def tokenmill(tmp_path: Path) -> Iterator[Tokenmill]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    command = Tokenmill(folder)
    yield command
    command.close()
