"""Flags to reach a gRPC server that speaks TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

import grpc

from controlplane.errors import SettingsError

__all__ = ["add_tls", "channel_credentials", "channel_options"]


def add_tls(parser: argparse.ArgumentParser) -> None:
    """--ca, --server-name, --cert and --key."""
    tls = parser.add_argument_group("of a frontend that serves TLS")
    tls.add_argument("--ca", metavar="FILE", help="PEM of the CA that signed its certificate; without: clear text")
    tls.add_argument("--server-name", metavar="NAME", help="in its certificate, where that is not the host asked")
    tls.add_argument("--cert", metavar="FILE", help="PEM of a certificate of ours, where it wants one")
    tls.add_argument("--key", metavar="FILE", help="PEM of the key of --cert")


def channel_credentials(arguments: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None: clear text. Raises `SettingsError` for a file that cannot be read."""
    if not arguments.ca:
        return None
    ca, key, cert = (_read(path) if path else None for path in (arguments.ca, arguments.key, arguments.cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def channel_options(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """For a channel with these credentials."""
    return [("grpc.ssl_target_name_override", arguments.server_name)] if arguments.server_name else []


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
