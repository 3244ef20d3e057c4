"""A frontend with a certificate: HTTPS and gRPC over TLS, and for mutual TLS only clients that show theirs."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli import health
from controlplane.errors import Unavailable
from tests.integration.frontend.peers import Frontend, running_frontend
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class Pki:
    """The files of one CA, a server's certificate and a client's."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Pki:
        ca = trustme.CA()
        ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        for name, host in (("server", "localhost"), ("client", "client.example")):
            issued = ca.issue_cert(host)
            issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
            issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.crt"))
        return cls(folder)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def credentials(self, *, client: bool) -> grpc.ChannelCredentials:
        own = [(self.folder / name).read_bytes() for name in ("client.key", "client.crt")] if client else [None, None]
        return grpc.ssl_channel_credentials((self.folder / "ca.pem").read_bytes(), *own)

    def context(self, *, client: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.pem"))
        if client:
            context.load_cert_chain(self.path("client.crt"), self.path("client.key"))
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def frontend(etcd: str, nats: str, pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    log = tmp_path_factory.mktemp("frontend") / "log"
    flags = ("--tls-cert", pki.path("server.crt"), "--tls-key", pki.path("server.key"))
    with running_frontend(etcd, nats, log, *flags, "--api-keys", "secret", tls=pki.context(client=False)) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(etcd: str, nats: str, pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    log = tmp_path_factory.mktemp("mutual") / "log"
    flags = ("--tls-cert", pki.path("server.crt"), "--tls-key", pki.path("server.key"))
    more = ("--tls-client-ca", pki.path("ca.pem"))
    with running_frontend(etcd, nats, log, *flags, *more, tls=pki.context(client=True)) as running:
        yield running


async def test_https_and_grpc_are_served_with_the_certificate_and_keys_still_count(
    frontend: Frontend, pki: Pki
) -> None:
    async with httpx.AsyncClient(verify=pki.context(client=False)) as http:
        assert (await http.get(f"{frontend.url}/v1/models")).status_code == 401
        with_key = await http.get(f"{frontend.url}/v1/models", headers={"authorization": "Bearer secret"})
        assert with_key.json() == {"object": "list", "data": []}
    address = f"localhost:{frontend.grpc_port}"
    async with grpc.aio.secure_channel(address, pki.credentials(client=False)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("authorization", "Bearer secret"),))


async def test_clear_text_is_not_answered(frontend: Frontend) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://localhost:{frontend.http_port}/health")
    async with grpc.aio.insecure_channel(f"localhost:{frontend.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_with_a_ca_for_clients_only_those_that_show_a_certificate_of_it_come_in(
    mutual: Frontend, pki: Pki
) -> None:
    async with httpx.AsyncClient(verify=pki.context(client=True)) as http:
        assert (await http.get(f"{mutual.url}/health")).status_code == 200
    async with httpx.AsyncClient(verify=pki.context(client=False)) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"{mutual.url}/health")
    for client, code in ((True, grpc.StatusCode.OK), (False, grpc.StatusCode.UNAVAILABLE)):
        channel = grpc.aio.secure_channel(f"localhost:{mutual.grpc_port}", pki.credentials(client=client))
        async with channel:
            call = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
            assert await call.code() is code


def test_health_can_be_asked_over_tls(
    frontend: Frontend, mutual: Frontend, pki: Pki, capsys: pytest.CaptureFixture[str]
) -> None:
    # No worker is there, so neither is serving; that it says so is the point.
    trust = ("--ca", pki.path("ca.pem"), "--server-name", "localhost")
    assert health.main([f"127.0.0.1:{frontend.grpc_port}", *trust]) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
    with pytest.raises(Unavailable):
        health.main([f"127.0.0.1:{mutual.grpc_port}", *trust])
    own = ("--cert", pki.path("client.crt"), "--key", pki.path("client.key"))
    assert health.main([f"127.0.0.1:{mutual.grpc_port}", *trust, *own]) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
