"""`tokenmill health`: asks a service's own gRPC health, as container engines do every few seconds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.tls import add_tls, channel_credentials, channel_options
from controlplane.errors import Unavailable

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status; returns 0 when it is SERVING, else 1."""
    arguments = _parser().parse_args(argv)
    with _channel(arguments) as channel:
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout)
        except grpc.RpcError as error:
            raise Unavailable(f"{arguments.address}: {error.code().name}, {error.details()}") from error
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(arguments: argparse.Namespace) -> grpc.Channel:
    credentials = channel_credentials(arguments)
    if credentials is None:
        return grpc.insecure_channel(arguments.address)
    return grpc.secure_channel(arguments.address, credentials, channel_options(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmill health",
        description="Asks a service whether it can do its work now. Exit code 0: SERVING; 1: not, or no answer.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{os.environ.get('TOKENMILL_GRPC_PORT', '50051')}",
        help="of its gRPC server [default %(default)s, from env TOKENMILL_GRPC_PORT]",
    )
    parser.add_argument("--service", default="", metavar="NAME", help="a gRPC service's full name; default: all of it")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="[default %(default)s]")
    add_tls(parser)
    return parser
