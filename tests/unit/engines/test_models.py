from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.errors import SettingsError
from engines.models import local_models, resolve_model


def test_a_directory_with_a_config_is_taken_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == str(tmp_path / "mine")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(SettingsError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["org/name", "name-1.5"])
def test_a_hub_id_is_passed_on(name: str) -> None:
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "./nowhere", "a/b/c", "two words"])
def test_what_is_neither_directory_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="model: ") as error:
        resolve_model(name)
    assert error.value.param == "model"


def test_local_models_lists_what_is_under_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    assert local_models() == []
    model = tmp_path / "models" / "one"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "models" / "other").mkdir()
    assert [(m.name, m.path, m.size_bytes) for m in local_models()] == [("one", model, 2)]
