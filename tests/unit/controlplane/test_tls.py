"""What `ServerTls.load` says of files it cannot use; that it serves with good ones is shown on a frontend."""

from __future__ import annotations

import ssl
import subprocess

import pytest
import trustme

from controlplane.errors import SettingsError
from controlplane.tls import ServerTls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("own", "other"):
        issued = ca.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.crt"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    (folder / "empty").write_text("")
    (folder / "cut.crt").write_text((folder / "own.crt").read_text()[:200])
    locked = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", "own.key", "-out", "locked.key"]
    subprocess.run(locked, cwd=folder, check=True)
    (folder / "rubbish.ca").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return {path.name: str(path) for path in folder.iterdir()} | {"": "", "missing": str(folder / "missing")}


def test_without_any_setting_there_is_no_tls() -> None:
    assert ServerTls.load("frontend", "", "", "") is None


@pytest.mark.parametrize(("client_ca", "mode"), [("", ssl.CERT_NONE), ("ca.pem", ssl.CERT_REQUIRED)])
def test_clients_must_show_a_certificate_exactly_where_a_ca_for_them_is_given(
    files: dict[str, str], client_ca: str, mode: ssl.VerifyMode
) -> None:
    tls = ServerTls.load("frontend", files["own.crt"], files["own.key"], files[client_ca])
    assert tls is not None
    assert tls.http.verify_mode == mode


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "param", "says"),
    [
        ("own.crt", "", "", "tls_key", "tls_cert is set but frontend.tls_key is not"),
        ("", "own.key", "", "tls_cert", "tls_key is set but frontend.tls_cert is not"),
        ("", "", "ca.pem", "tls_cert", "tls_client_ca is set but"),
        ("missing", "own.key", "", "tls_cert", "No such file"),
        ("own.crt", "empty", "", "tls_key", "no PEM of a private key"),
        ("own.key", "own.key", "", "tls_cert", "no PEM of a certificate"),
        ("own.crt", "other.key", "", "tls_key", "is not the key of"),
        ("own.crt", "locked.key", "", "tls_key", "openssl pkey -in"),
        ("cut.crt", "own.key", "", "tls_cert", "whole PEM files"),
        ("own.crt", "own.key", "own.key", "tls_client_ca", "no PEM of a CA certificate"),
        ("own.crt", "own.key", "rubbish.ca", "tls_client_ca", "no PEM of a CA certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting_and_a_fix(
    files: dict[str, str], cert: str, key: str, client_ca: str, param: str, says: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        ServerTls.load("frontend", files[cert], files[key], files[client_ca])
    assert refused.value.param == f"frontend.{param}"
    assert says in refused.value.message
    at_fault = files[{"tls_cert": cert, "tls_key": key, "tls_client_ca": client_ca}[param]]
    assert at_fault in refused.value.message
