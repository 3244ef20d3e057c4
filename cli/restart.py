"""`tokenmill restart`: brings parts of a deployment on this machine back, or has new ones take their places."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import time
from collections.abc import Sequence

import grpc

from cli.arguments import add_deployment
from controlplane.deployment import run_folder, running
from controlplane.errors import InvalidRequest, SettingsError, Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.supervisor_service import supervisor_called
from tokenmill.supervisor.v1 import supervisor_pb2, supervisor_pb2_grpc

__all__ = ["main"]

_LIST_TIMEOUT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 0 when all that was named works again."""
    parser = argparse.ArgumentParser(
        prog="tokenmill restart",
        description="Restarts parts of a deployment that `tokenmill up` runs on this machine, one after another, and "
        "brings those back that were drained. With --rolling each service is followed by a new instance of it, ready "
        "before the old one drains: no request is lost, and no connection refused.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="as in the logs: decode-1, frontend, etcd; or an instance's id"
    )
    parser.add_argument(
        "--rolling", action="store_true", help="new instance first; without names every service, but not etcd and NATS"
    )
    add_deployment(parser)
    arguments = parser.parse_args(argv)
    if not arguments.names and not arguments.rolling:
        raise SettingsError("name what to restart, or say --rolling for every service")
    if running(arguments.deployment) is None:
        raise Unavailable(_elsewhere(arguments.deployment))
    return asyncio.run(_restart(arguments))


async def _restart(arguments: argparse.Namespace) -> int:
    async with supervisor_called(run_folder(arguments.deployment)) as supervisor:
        children = await _children(supervisor)
        for name in _named(arguments.names, children) or [child.name for child in children if child.instance_id]:
            started = time.monotonic()
            print(f"{name}: restarting", flush=True)
            request = supervisor_pb2.RestartRequest(name=name, successor_first=arguments.rolling)
            try:
                child = (await supervisor.Restart(request)).child
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            who = f"{child.instance_id}, " if child.instance_id else ""
            print(f"{name}: ready after {time.monotonic() - started:.1f} s ({who}pid {child.pid})", flush=True)
    return 0


async def _children(supervisor: supervisor_pb2_grpc.SupervisorStub) -> Sequence[supervisor_pb2.Child]:
    try:
        return (await supervisor.List(supervisor_pb2.ListRequest(), timeout=_LIST_TIMEOUT_S)).children
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"the supervisor does not answer ({error.details()}); is it still starting?") from error


def _named(names: Sequence[str], children: Sequence[supervisor_pb2.Child]) -> list[str]:
    """Names of children, given by their own or by their instance's."""
    known = {child.name: child.name for child in children} | {
        child.instance_id: child.name for child in children if child.instance_id
    }
    for name in names:
        if name not in known:
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise InvalidRequest(f"nothing here is called {name!r}; the nearest is {nearest!r}")
    return [known[name] for name in dict.fromkeys(names)]


def _elsewhere(deployment: str) -> str:
    return (
        f"deployment {deployment!r} is not run by `tokenmill up` on this machine, so whoever runs its processes must "
        "restart them. One instance at a time, without losing a request: start another one of the same service, wait "
        "until `tokenmill status --etcd HOST:PORT` shows it ready, then `tokenmill drain` the old one. With Compose: "
        "docker compose up -d --no-recreate --scale SERVICE=2 SERVICE, drain, scale back. With Kubernetes: "
        "kubectl rollout restart deployment SERVICE"
    )
