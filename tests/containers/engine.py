"""A Docker engine with Compose to test on: the one that is here, or one that is set up, as root on Debian or Ubuntu."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CACHE", "ROOT", "NoEngine", "apt_install", "docker", "fetch_packages", "inspect", "running_engine"]

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "containers"
"""Kept between runs: tools and packages that were fetched."""

_OLDEST_COMPOSE = (2, 20)
_START_TIMEOUT_S = 60
_PACKAGES = ("docker.io", "iptables", "ca-certificates")
_WITH_COMPOSE = "trixie"
"""Debian's release that has Compose 2; only that one file is taken from it."""


class NoEngine(Exception):
    """The message says what to do."""


def docker(*arguments: str, timeout_s: float = 60, check: bool = True, text: str | None = None) -> str:
    """Runs the command line to its end; returns what it printed. Raises with what it complained of."""
    done = subprocess.run(
        ["docker", *arguments], input=text, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if check and done.returncode != 0:
        raise AssertionError(f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def running_engine() -> Iterator[None]:
    """Docker and Compose answer inside it. An engine that had to be started is stopped after it."""
    if not shutil.which("docker"):
        apt_install(*_PACKAGES)
    daemon = None if _answers() else _start_daemon()
    try:
        if _compose_version() < _OLDEST_COMPOSE:
            _fetch_compose()
        yield
    finally:
        if daemon is not None:
            daemon.terminate()
            daemon.wait(timeout=60)


def _answers() -> bool:
    return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=60).returncode == 0


def _start_daemon() -> subprocess.Popen[bytes]:
    if os.environ.get("DOCKER_HOST"):
        raise NoEngine(f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}")
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can start one: start it, or run this as root")
    if not shutil.which("dockerd") or not shutil.which("iptables"):
        apt_install(*_PACKAGES)
    CACHE.mkdir(parents=True, exist_ok=True)
    log_file = CACHE / "dockerd.log"
    with log_file.open("wb") as log:
        daemon = subprocess.Popen(["dockerd"], stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _answers():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-10:])
            raise NoEngine(f"dockerd did not start; its log ends:\n{tail}")
        time.sleep(0.2)
    return daemon


def _compose_version() -> tuple[int, ...]:
    printed = docker("compose", "version", "--short", check=False)
    return tuple(int(part) for part in re.findall(r"\d+", printed)[:2])


def _fetch_compose() -> None:
    """Puts Compose 2 into a configuration folder of ours, which becomes this process's."""
    plugin = CACHE / "docker" / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        (package,) = fetch_packages(
            "docker-compose", source=f"deb [trusted=yes] {_debian_mirror()} {_WITH_COMPOSE} main"
        )
        unpacked = CACHE / "docker-compose"
        subprocess.run(["dpkg", "-x", package, unpacked], check=True, timeout=60)
        plugin.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(unpacked / "usr/libexec/docker/cli-plugins/docker-compose", plugin)
    os.environ["DOCKER_CONFIG"] = str(plugin.parent.parent)
    if _compose_version() < _OLDEST_COMPOSE:
        raise NoEngine("docker compose 2.20 or later is needed, and Debian's could not be used: install it")


def fetch_packages(*names: str, source: str | None = None) -> list[Path]:
    """Debian packages as files, without installing them."""
    if not shutil.which("apt-get"):
        raise NoEngine(f"{', '.join(names)} cannot be fetched here: this is no Debian or Ubuntu; install by hand")
    folder = CACHE / "packages"
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    options = []
    if source is not None:
        (folder / "sources.list").write_text(source + "\n")
        options = [
            *("-o", f"Dir::Etc::sourcelist={folder / 'sources.list'}", "-o", "Dir::Etc::sourceparts=-"),
            *("-o", f"Dir::State::lists={folder / 'lists'}"),
        ]
    for command in ("update", "download"):
        told = ["apt-get", *options, "--quiet", command, *(names if command == "download" else ())]
        done = subprocess.run(told, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise NoEngine(f"{' '.join(told)} failed:\n{done.stdout}{done.stderr}")
    return [max(folder.glob(f"{name}_*.deb")) for name in names]


def _debian_mirror() -> str:
    """Where this machine takes Debian's packages from."""
    told = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(told, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    mirrors = [uri for uri in found if uri.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise NoEngine("docker compose 2.20 or later is needed, and this machine knows no Debian mirror: install it")
    return mirrors[0]


def apt_install(*names: str) -> None:
    """Installs Debian packages, or says why it may not."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoEngine(
            "Docker is not installed. As root on Debian or Ubuntu this installs it; here, see "
            "https://docs.docker.com/engine/install"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
        done = subprocess.run(
            ["apt-get", "--quiet", *command], capture_output=True, text=True, timeout=900, env=environment, check=False
        )
        if done.returncode != 0:
            raise NoEngine(f"apt-get {' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def inspect(name: str, kind: str = "container") -> dict[str, object]:
    """What the engine knows of a container or an image."""
    (found,) = json.loads(docker(kind, "inspect", name))
    return dict(found)
