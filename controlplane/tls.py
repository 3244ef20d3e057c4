"""TLS for what a service listens with: a certificate and its key, and for mutual TLS the CA of the clients' ones."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from controlplane.errors import SettingsError

__all__ = ["ServerTls"]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The same identity and demands for gRPC and HTTP. Files are read once: a new certificate needs a restart."""

    grpc: grpc.ServerCredentials
    http: ssl.SSLContext

    @classmethod
    def load(cls, section: str, tls_cert: str, tls_key: str, tls_client_ca: str) -> ServerTls | None:
        """From the PEM files that these settings of `section` name; None when none is set. Raises `SettingsError`."""
        paths = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
        if not any(paths.values()):
            return None
        for name in ("tls_cert", "tls_key"):
            if not paths[name]:
                given = next(other for other, path in paths.items() if path)
                raise SettingsError(
                    f"{section}.{given} is set but {section}.{name} is not: set both tls_cert and tls_key, or none of "
                    "the tls settings to serve without TLS",
                    param=f"{section}.{name}",
                )
        cert = _read(f"{section}.tls_cert", tls_cert, "CERTIFICATE", "a certificate")
        key = _read(f"{section}.tls_key", tls_key, "PRIVATE KEY", "a private key")
        client_ca = (
            _read(f"{section}.tls_client_ca", tls_client_ca, "CERTIFICATE", "a CA certificate")
            if tls_client_ca
            else None
        )
        http = _context(section, tls_cert, tls_key)
        if client_ca is not None:
            try:
                http.load_verify_locations(cadata=client_ca.decode("ascii"))
            except (ssl.SSLError, UnicodeDecodeError) as error:
                raise _unusable(f"{section}.tls_client_ca", tls_client_ca, "a CA certificate") from error
            http.verify_mode = ssl.CERT_REQUIRED
        credentials = grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=client_ca, require_client_auth=client_ca is not None
        )
        return cls(credentials, http)


def _read(setting: str, path: str, label: str, what: str) -> bytes:
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting}: cannot read {path}: {error.strerror}", param=setting) from error
    if f"{label}-----".encode() not in pem:
        raise _unusable(setting, path, what)
    if b"ENCRYPTED" in pem:
        raise SettingsError(
            f"{setting}: {path} is protected by a password, which nobody is there to type at a start; "
            f"write it without one: openssl pkey -in {path} -out NEW_FILE",
            param=setting,
        )
    return pem


def _context(section: str, cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"{section}.tls_key: {key} is not the key of the first certificate in {cert}; give the pair that was "
                "issued together, the server's own certificate before those of its CAs",
                param=f"{section}.tls_key",
            ) from error
        raise SettingsError(
            f"{section}.tls_cert {cert} and {section}.tls_key {key} cannot be used ({error.reason or error}); "
            "both must be whole PEM files",
            param=f"{section}.tls_cert",
        ) from error
    return context


def _unusable(setting: str, path: str, what: str) -> SettingsError:
    return SettingsError(f"{setting}: {path} holds no PEM of {what}; give another file", param=setting)
