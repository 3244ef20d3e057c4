from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controlplane.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from controlplane.errors import Unavailable


@pytest.mark.parametrize("kind", [EmbeddedEtcd, EmbeddedNats])
def test_a_killed_server_comes_back_on_its_port(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind.start(tmp_path)
    server.wait_ready()
    endpoint = server.endpoint
    server.kill()
    assert not server.ready()
    server.restart()
    server.wait_ready()
    assert server.endpoint == endpoint
    server.stop()
    assert server.process.returncode is not None


@pytest.mark.parametrize("kind", [EmbeddedEtcd, EmbeddedNats])
def test_it_listens_on_the_loopback_address_only(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind.start(tmp_path)
    server.wait_ready()
    listening = [c for c in psutil.Process(server.process.pid).net_connections("inet") if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    server.stop()


def test_a_port_in_use_is_told_with_the_servers_own_words(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    second = EmbeddedEtcd.start(tmp_path, own_nats.port)
    with pytest.raises(Unavailable, match="address already in use"):
        second.wait_ready()


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from controlplane.embedded import EmbeddedNats\n"
        "server = EmbeddedNats.start(Path(sys.argv[1])); server.wait_ready()\n"
        "print(server.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running()


def test_an_etcd_can_come_back_empty(own_etcd: EmbeddedEtcd) -> None:
    own_etcd.kill()
    shutil.rmtree(own_etcd.data_dir)
    own_etcd.restart()
    own_etcd.wait_ready()
