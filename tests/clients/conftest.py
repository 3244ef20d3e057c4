"""A suite on the simulated engine with two frontends, and a client of each language."""

from __future__ import annotations

import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from tests.clients.builds import LANGUAGES, Built, Language
from tests.integration.frontend.peers import Frontend, running_frontend

KEY = "the-key"


@dataclass(frozen=True)
class Suite:
    """`open` serves anybody in clear text; `closed` speaks TLS and wants `KEY`. Both serve the model "sim"."""

    open: Frontend
    closed: Frontend
    ca: Path


@pytest.fixture(scope="session")
def suite(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = tmp_path_factory.mktemp("suite")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    server = authority.issue_cert("localhost")
    server.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    server.private_key_pem.write_to_path(str(folder / "tls.key"))
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with ExitStack() as stack:
        front = stack.enter_context(running_frontend(etcd, nats, folder / "open.log"))
        flags = ("--deployment", front.deployment)
        tls = ("--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"), "--api-keys", KEY)
        closed = stack.enter_context(running_frontend(etcd, nats, folder / "closed.log", *flags, *tls, tls=trust))
        for service, more in (("router", ()), ("decode", ("--engine", "sim"))):
            log = stack.enter_context((folder / f"{service}.log").open("wb"))
            command = [sys.executable, "-m", f"services.{service}", "--etcd", etcd, "--nats", nats, *flags, *more]
            process = subprocess.Popen(command, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        _until_ready(front, closed, trust)
        yield Suite(front, closed, folder / "ca.pem")


def _until_ready(front: Frontend, closed: Frontend, trust: ssl.SSLContext) -> None:
    deadline = time.monotonic() + 60
    with httpx.Client(verify=trust) as http:
        while any(http.get(f"{one.url}/ready").status_code != 200 for one in (front, closed)):
            assert time.monotonic() < deadline, "no worker came"
            time.sleep(0.1)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(language, id=language.name, marks=() if language.name == "python" else pytest.mark.toolchain)
        for language in LANGUAGES
    ],
)
def client(request: pytest.FixtureRequest) -> Built:
    """Each language's program in turn."""
    language: Language = request.param
    return language.build()
