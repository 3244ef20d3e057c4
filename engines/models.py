"""What `--model` may name: "demo", a local directory, or an id on the model hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from controlplane.errors import SettingsError
from engines import demo_model

__all__ = ["DEMO", "LocalModel", "local_models", "resolve_model"]

DEMO = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model directory under Tokenmill's own folder."""

    name: str
    path: Path
    size_bytes: int


def resolve_model(name: str, on_progress: demo_model.OnProgress = lambda text, done: None) -> str:
    """What an engine is given for `name`: an absolute directory, or a hub id. Makes the demonstration model first.

    Raises `SettingsError` for what is neither. Blocks while the demonstration model is made or checked.
    """
    if name == DEMO:
        return str(demo_model.fetch(on_progress=on_progress))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SettingsError(
                f"model: {path} holds no config.json; name a directory in Hugging Face layout", param="model"
            )
        return str(path.absolute())
    if path.exists():
        raise SettingsError(f"model: {path} is a file; name the directory that holds config.json", param="model")
    if not _HUB_ID.fullmatch(name):
        raise SettingsError(
            f"model: no directory {name!r}, and it is no hub id (ORGANISATION/NAME); "
            f'"{DEMO}" is a small model to begin with',
            param="model",
        )
    return name


def local_models() -> list[LocalModel]:
    """The model directories that `tokenmill models fetch` has made, by name."""
    folder = demo_model.default_path().parent
    return [
        LocalModel(path.name, path, sum(file.stat().st_size for file in path.iterdir()))
        for path in sorted(folder.iterdir() if folder.is_dir() else [])
        if (path / "config.json").is_file() and not path.name.startswith(".")
    ]
