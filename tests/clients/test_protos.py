"""buf, from the npm registry, on the protos."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.protos import write_descriptors
from tests.clients.builds import ROOT

pytestmark = pytest.mark.toolchain


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("npx") is None:
        pytest.skip("no npx here; on Debian: apt-get install npm")
    command = ("npx", "--yes", "@bufbuild/buf@1.75.0", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_protos_keep_the_rules_of_buf_yaml() -> None:
    done = buf("lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_can_be_held_against_the_descriptor_set_of_a_release(tmp_path: Path) -> None:
    write_descriptors(tmp_path / "tokenmill.binpb")
    done = buf("breaking", "--against", str(tmp_path / "tokenmill.binpb"))
    assert done.returncode == 0, done.stdout + done.stderr
