"""Which processes a deployment on this machine is made of, and what each is told. Starts nothing."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cli.sections import ALL_SECTIONS
from cli.up.ports import FrontendPorts
from cli.up.settings import UpSettings
from controlplane.child_process import ChildSpec
from controlplane.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer, free_port
from controlplane.settings import CommonSettings, Loaded, as_env
from engines.settings import EngineSettings
from services.fleet.settings import FleetSettings
from services.frontend.settings import FrontendSettings

__all__ = ["Plan", "make_plan"]

# A stage has ended before the one below it is told to stop: the frontend first, so that its running requests find their
# workers, and last what everybody talks through.
_SERVERS_STAGE, _MIDDLE_STAGE, _FRONTEND_STAGE = range(3)

_WORKERS = ("prefill", "decode")

_LONGEST_TEMPORARY_PATH = 50
"""Engines put Unix sockets there, with names of 40 characters and more, and a socket's path has 107 at most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of a deployment, and how to find them."""

    deployment: str
    children: tuple[ChildSpec, ...]
    frontend: str
    """The frontend's instance id."""
    servers: tuple[EmbeddedServer, ...]
    """Those that run as children, under their own names."""
    etcd: str
    nats: str
    drain_timeout_s: float

    @property
    def services(self) -> Mapping[str, str]:
        """Instance id, as it is at the start -> name of the child that runs it."""
        return {child.instance_id: child.name for child in self.children if child.instance_id}


def make_plan(
    loaded: Loaded, model: str, folder: Path, environment: Mapping[str, str], ports: FrontendPorts | None = None
) -> Plan:
    """Lays a deployment out; all its files go below `folder`. `model` is what the engine is given.

    Without `ports` the frontend opens its own.
    """
    up, common = loaded.get(UpSettings), loaded.get(CommonSettings)
    # What a killed service leaves in its temporary folder goes with ours.
    temporary = folder / "tmp"
    temporary.mkdir()
    servers: list[EmbeddedServer] = []
    if loaded.sources["common.etcd"] == "default":
        servers.append(etcd := EmbeddedEtcd(folder / "data", free_port(), durable=True))
        common = replace(common, etcd=etcd.endpoint)
    if loaded.sources["common.nats"] == "default":
        servers.append(nats := EmbeddedNats(folder / "data", free_port(), durable=True))
        common = replace(common, nats=nats.endpoint)
    if common.log_format == "auto":
        common = replace(common, log_format="human")

    engine = replace(loaded.get(EngineSettings), model=model)
    if up.fleet:  # all workers alike, so that they are one pool
        engine = replace(engine, sim_kv_bytes_per_block=0)
    this_run = secrets.token_hex(3)
    frontend = loaded.get(FrontendSettings)
    children = [
        ChildSpec(
            server.name, tuple(server.command()), _SERVERS_STAGE, death_signal=signal.SIGKILL, answers=server.ready
        )
        for server in servers
    ]

    def add(
        service: str, name: str, stage: int, own: CommonSettings, more: dict[str, str], sockets: tuple[int, ...] = ()
    ) -> str:
        instance_id = f"{name}-{this_run}"
        told = _environment(loaded, service, engine, environment, temporary)
        env = told | as_env("common", replace(own, instance_id=instance_id)) | more
        command = (sys.executable, "-P", "-m", f"services.{service}")
        # A worker's answers go on elsewhere when its drain takes long; a frontend's cannot.
        retire = signal.SIGQUIT if service == "frontend" else signal.SIGTERM
        children.append(
            ChildSpec(name, command, stage, env, instance_id=instance_id, sockets=sockets, retire_signal=retire)
        )
        return instance_id

    # The ports that were asked for are the frontend's, and stay the same over its restarts.
    anywhere = replace(common, grpc_port=0, metrics_port=0)
    add("router", "router", _MIDDLE_STAGE, anywhere, {})
    for role, count in zip(_WORKERS, (up.prefill, up.decode), strict=True):
        for number in range(1, count + 1):
            add(role, f"{role}-{number}" if count > 1 else role, _MIDDLE_STAGE, anywhere, {})
    fleet = loaded.get(FleetSettings)
    for number, first in enumerate(range(0, up.fleet, fleet.workers), 1):
        part = {"TOKENMILL_FLEET_WORKERS": str(min(fleet.workers, up.fleet - first))}
        add("fleet", f"fleet-{number}", _MIDDLE_STAGE, anywhere, part)
    frontend_id = add(
        "frontend",
        "frontend",
        _FRONTEND_STAGE,
        replace(
            common,
            grpc_port=ports.grpc if ports else common.grpc_port or free_port(),
            share_ports=ports is not None,
        ),
        as_env("frontend", replace(frontend, http_port=ports.http if ports else frontend.http_port or free_port())),
        ports.sockets if ports else (),
    )
    return Plan(
        deployment=common.deployment,
        children=tuple(children),
        frontend=frontend_id,
        servers=tuple(servers),
        etcd=common.etcd,
        nats=common.nats,
        drain_timeout_s=common.drain_timeout_s,
    )


def _environment(
    loaded: Loaded, service: str, engine: EngineSettings, environment: Mapping[str, str], temporary: Path
) -> dict[str, str]:
    """What a service is told: its settings as they were read here, from wherever, and nothing else of ours.

    All but [common], of which each process has its own.
    """
    told = {name: value for name, value in environment.items() if not name.startswith("TOKENMILL_")}
    if len(str(temporary)) <= _LONGEST_TEMPORARY_PATH:
        told["TMPDIR"] = str(temporary)
    told |= {name: environment[name] for name in ("TOKENMILL_HOME",) if name in environment}
    told |= as_env(service, loaded.get(ALL_SECTIONS[service]))
    if service in (*_WORKERS, "fleet"):
        told |= as_env("engine", engine)
    return told
