from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controlplane.errors import SettingsError
from engines.vllm.fingerprint import fingerprint, locate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "a.safetensors").write_bytes(b"weights" * 1000)
    (directory / "b.safetensors").write_bytes(b"more" * 1000)
    return directory


def test_equal_content_gives_an_equal_fingerprint_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    (copy / "tokenizer.json").write_text("not a weight")
    assert fingerprint(copy) == fingerprint(model)


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_one_changed_byte_changes_it(model: Path, name: str) -> None:
    before = fingerprint(model)
    content = bytearray((model / name).read_bytes())
    content[-1] ^= 1
    (model / name).write_bytes(content)
    assert fingerprint(model) != before


def test_files_swapped_are_another_model(model: Path) -> None:
    before = fingerprint(model)
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert fingerprint(model) != before


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no \*\.safetensors"):
        fingerprint(tmp_path)


def test_a_file_is_no_model(model: Path) -> None:
    assert locate(str(model)) == model
    with pytest.raises(SettingsError, match="is a file"):
        locate(str(model / "config.json"))
