"""Finds one instance in etcd and calls its Control service, for `drain` and `undrain`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from prometheus_client import CollectorRegistry

from cli.arguments import add_deployment, add_etcd, running_here
from cli.tls import add_tls, channel_credentials, channel_options
from controlplane.discovery import Discovery
from controlplane.errors import NotFound, SettingsError, Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import Instance
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from tokenmill.control.v1 import control_pb2_grpc

__all__ = ["add_instance", "controlled", "refused"]

_CONNECT_TIMEOUT_S = 5.0


def add_instance(parser: argparse.ArgumentParser) -> None:
    """INSTANCE, and all that finding and reaching it takes."""
    parser.add_argument("instance", metavar="INSTANCE", help="its id, as `tokenmill status` shows it")
    add_deployment(parser)
    add_etcd(parser)
    add_tls(parser)


@asynccontextmanager
async def controlled(
    arguments: argparse.Namespace,
) -> AsyncIterator[tuple[Instance, control_pb2_grpc.ControlStub, Discovery]]:
    """The instance, calls to it, and everybody's picture of it. Raises `NotFound` or `Unavailable`."""
    configure_logging(CommonSettings(log_level="error"), service="control")  # quiet, and away from standard output
    etcd = arguments.etcd or running_here(arguments.deployment).etcd
    discovery = await Discovery.connect(etcd, arguments.deployment, CollectorRegistry(), timeout_s=_CONNECT_TIMEOUT_S)
    try:
        instance = discovery.instances.get(arguments.instance)
        if instance is None:
            raise NotFound(_unknown(arguments.instance, arguments.deployment, list(discovery.instances)))
        async with _channel(instance, arguments) as channel:
            yield instance, control_pb2_grpc.ControlStub(channel), discovery
    finally:
        await discovery.close()


def refused(instance: Instance, error: grpc.aio.AioRpcError) -> Exception:
    """What to tell of a call that failed."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(
            f"{instance.instance_id} ({instance.state.value}, process {instance.pid} on {instance.host}) does not "
            f"answer at {instance.address}: {error.details() or error.code().name}"
        )
    return from_rpc_error(error)


def _channel(instance: Instance, arguments: argparse.Namespace) -> grpc.aio.Channel:
    if not instance.tls:
        return grpc.aio.insecure_channel(instance.address)
    credentials = channel_credentials(arguments)
    if credentials is None:
        raise SettingsError(f"{instance.instance_id} speaks TLS only: say with --ca FILE how to trust it")
    return grpc.aio.secure_channel(instance.address, credentials, channel_options(arguments))


def _unknown(instance_id: str, deployment: str, known: list[str]) -> str:
    if not known:
        return f"nothing of deployment {deployment!r} is registered"
    nearest = difflib.get_close_matches(instance_id, known, n=1, cutoff=0.0)[0]
    return (
        f"deployment {deployment!r} has no instance {instance_id!r}, or no longer; the nearest is {nearest!r}, and "
        "`tokenmill status` lists all"
    )
