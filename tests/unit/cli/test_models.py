from __future__ import annotations

from pathlib import Path

import pytest

from cli import models


def test_models_list_prints_name_size_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    model = tmp_path / "models" / "one"
    model.mkdir(parents=True)
    (model / "config.json").write_bytes(b" " * 3_000_000)
    assert models.main(["list"]) == 0
    assert capsys.readouterr().out == f"one\t3 MB\t{model}\n"


def test_models_fetch_refuses_a_name_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        models.main(["fetch", "gpt-9"])
    assert error.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_progress_without_a_terminal_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with models.progress_bar("demo") as show:
        show("downloading", 0.1)
        show("downloading", 0.2)
        show("ready", 1.0)
    assert capsys.readouterr().err == "demo: downloading\ndemo: ready\n"
