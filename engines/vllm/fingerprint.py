"""Which model this is, by its content: equal on every machine that holds equal weights, wherever they lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from controlplane.errors import SettingsError

__all__ = ["fingerprint", "locate"]

_CHUNK = 8 << 20


def locate(model: str) -> Path:
    """The local directory of `model`; a hub id is downloaded first. Blocks."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise SettingsError(f"model: {path} is a file; name the directory that holds config.json", param="model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise SettingsError(
            f"model: {model!r} is no local directory, and the hub did not give it ({type(error).__name__})",
            param="model",
        ) from error


def fingerprint(directory: Path) -> str:
    """xxh3_128 over the configuration and every byte of the weights, in the order of their files' names.

    Blocks: about 0.2 s for 500 MB that the page cache holds, and the engine reads the same bytes next.
    """
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise SettingsError(f"model: {directory} holds no *.safetensors file", param="model")
    whole = xxhash.xxh3_128()
    with ThreadPoolExecutor(4) as pool:  # the hash and the reads both release the GIL
        for digest in pool.map(_digest, [directory / "config.json", *weights]):
            whole.update(digest)
    return whole.hexdigest()


def _digest(path: Path) -> bytes:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.digest()
