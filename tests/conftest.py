"""Real servers for tests. Each pytest-xdist worker has its own pair; a test keeps to its own deployment in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import hypothesis
import pytest

from controlplane.embedded import EmbeddedEtcd, EmbeddedNats

# No deadline an example: the machine may be busy.
hypothesis.settings.register_profile("tokenmill", deadline=None)
hypothesis.settings.load_profile("tokenmill")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a running etcd, for tests that leave it running."""
    server = EmbeddedEtcd.start(tmp_path_factory.mktemp("etcd"), durable=False)
    server.wait_ready()
    yield server.endpoint
    server.stop()


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running NATS, for tests that leave it running."""
    server = EmbeddedNats.start(tmp_path_factory.mktemp("nats"))
    server.wait_ready()
    yield server.endpoint
    server.stop()


@pytest.fixture
def deployment() -> str:
    """A deployment name nobody else uses."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """An etcd to kill, stop and restart."""
    server = EmbeddedEtcd.start(tmp_path_factory.mktemp("own-etcd"), durable=False)
    server.wait_ready()
    yield server
    server.kill()


@pytest.fixture
def own_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    """A NATS to kill, stop and restart."""
    server = EmbeddedNats.start(tmp_path_factory.mktemp("own-nats"))
    server.wait_ready()
    yield server
    server.kill()
