"""The deployment of a chaos run: what `tokenmill up` would start, at fixed addresses and with links to spoil."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from cli.chaos.links import Link
from cli.up.plan import Plan
from controlplane.child_process import ChildSpec
from controlplane.embedded import free_port
from controlplane.errors import DeadlineExceeded
from controlplane.grpc_errors import from_rpc_error
from controlplane.restart_policy import RestartPolicy
from controlplane.supervisor import Supervisor
from tokenmill.control.v1 import control_pb2, control_pb2_grpc

__all__ = ["MARK", "Metrics", "Part", "Suite", "lay_out", "marked_processes"]

MARK = "CHAOS_RUN"
"""Environment variable of every process of a run, by which those it left behind are found."""

_HOST, _LINK_HOST = "127.0.0.1", "127.0.0.2"
"""A service listens on the first, and its link on the second, at the same port: only the link is advertised."""
_ROLES = ("router", "prefill", "decode", "frontend")
_POLL_S = 0.1
_ASK_S = 2.0
"""For an answer from a part that may be unwell."""
_PATIENT_S = 30.0
_LONGEST_RESTART_DELAY_S = 2.0
"""Chaos kills what is healthy, again and again: its restarts are not to be put off as those of a part that fails."""

_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200))

Metrics = Mapping[str, float]
"""Of one process: name -> its value, summed over labels; for those with an outcome, "name outcome" as well."""


@dataclass(frozen=True, slots=True)
class Part:
    """A service's process and its addresses."""

    name: str
    role: str
    grpc_port: int
    metrics_port: int
    http_port: int = 0
    """A frontend's."""

    @property
    def address(self) -> str:
        """Of its own gRPC server, past the link."""
        return f"{_HOST}:{self.grpc_port}"

    @property
    def url(self) -> str:
        """Of a frontend's HTTP API."""
        return f"http://{_HOST}:{self.http_port}"


def lay_out(
    plan: Plan, counts: Mapping[str, int], engine_faults: Mapping[str, str], mark: str
) -> tuple[list[ChildSpec], list[Part], dict[str, int]]:
    """The plan's processes, those of which there are to be `counts` repeated, with fixed ports.

    `engine_faults`: role -> what its simulated engines can do wrong. Also the services among them, and link name ->
    the port it listens at: "etcd of decode-1".
    """
    fresh = _fresh_ports({server.port for server in plan.servers})
    children, parts, links = [], [], dict[str, int]()
    for spec in plan.children:
        role = spec.name.split("-")[0]
        if role not in _ROLES:
            children.append(replace(spec, env={**os.environ, MARK: mark}))
            continue
        count = counts.get(role, 1)
        for number in range(1, count + 1):
            name = f"{spec.name}-{number}" if count > 1 else spec.name
            part = Part(name, role, next(fresh), next(fresh), next(fresh) if role == "frontend" else 0)
            own = {
                MARK: mark,
                "TOKENMILL_INSTANCE_ID": f"{name}-{mark}",
                "TOKENMILL_GRPC_PORT": str(part.grpc_port),
                "TOKENMILL_METRICS_PORT": str(part.metrics_port),
            }
            if role in engine_faults:
                own["TOKENMILL_ENGINE_FAULT"] = engine_faults[role]
            if role == "frontend":
                own["TOKENMILL_FRONTEND_HTTP_PORT"] = str(part.http_port)
            for server, variable, address in (
                ("etcd", "TOKENMILL_ETCD", "{}:{}"),
                ("nats", "TOKENMILL_NATS", "nats://{}:{}"),
            ):
                port = links[f"{server} of {name}"] = next(fresh)
                own[variable] = address.format(_LINK_HOST, port)
            parts.append(part)
            children.append(
                replace(spec, name=name, instance_id=own["TOKENMILL_INSTANCE_ID"], env={**(spec.env or {}), **own})
            )
    return children, parts, links


def _fresh_ports(taken: set[int]) -> Iterator[int]:
    while True:
        port = free_port()
        if port not in taken:
            taken.add(port)
            yield port


class Suite:
    """An async context manager: inside it the deployment runs, after it nothing of it does."""

    def __init__(
        self,
        plan: Plan,
        counts: Mapping[str, int],
        engine_faults: Mapping[str, str],
        folder: Path,
        mark: str,
        *,
        network: bool,
    ) -> None:
        specs, self.parts, ports = lay_out(plan, counts, engine_faults, mark)
        if network:
            specs = [_advertising_its_link(spec, self.parts) for spec in specs]
        self.folder = folder
        self.mark = mark
        self.links: dict[str, Link] = {}
        """By name: "etcd of decode-1", and with `network` "decode-1"."""
        servers = {server.name: server.port for server in plan.servers}
        for name, port in ports.items():
            self.links[name] = Link((_LINK_HOST, port), (_HOST, servers[name.split(" ")[0]]))
        if network:
            for part in self.parts:
                if part.role != "frontend":
                    self.links[part.name] = Link((_LINK_HOST, part.grpc_port), (_HOST, part.grpc_port))
        logs = folder / "logs"
        logs.mkdir()
        self.log_lines: list[str] = []
        self._servers = plan.servers
        self.supervisor = Supervisor(
            specs,
            logs,
            lambda name, text: self.log_lines.append(f"{name}: {text}"),
            drain_timeout_s=plan.drain_timeout_s,
            restart_policy=lambda: RestartPolicy(longest_delay_s=_LONGEST_RESTART_DELAY_S),
        )
        self._stack = AsyncExitStack()
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def roles(self) -> dict[str, list[str]]:
        """Role -> names of its parts; etcd, NATS and the clients are parts of their own."""
        found: dict[str, list[str]] = {server.name: [server.name] for server in self._servers} | {"clients": ["all"]}
        for part in self.parts:
            found.setdefault(part.role, []).append(part.name)
        return found

    @property
    def frontends(self) -> list[Part]:
        """Whom clients ask."""
        return [part for part in self.parts if part.role == "frontend"]

    async def __aenter__(self) -> Self:
        self._http = await self._stack.enter_async_context(httpx.AsyncClient(timeout=_PATIENT_S, trust_env=False))
        for link in self.links.values():
            await self._stack.enter_async_context(link)
        for part in self.parts:
            channel = grpc.aio.insecure_channel(part.address, _RECONNECT)
            self._channels[part.name] = await self._stack.enter_async_context(channel)
        await self._stack.enter_async_context(self.supervisor)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def until_well(
        self, names: Collection[str], timeout_s: float, ended: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Waits until these parts can do their work, in other processes than those of `ended`.

        Raises `DeadlineExceeded`.
        """
        missing: Collection[str] = names
        try:
            async with asyncio.timeout(timeout_s):
                while any(pid and self.supervisor.pid(name) in (0, pid) for name, pid in ended.items()):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                while missing := await self._missing(names):  # noqa: ASYNC110  other processes' doing
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(f"after {timeout_s:g} s not at work: {', '.join(sorted(missing))}") from None

    @property
    def everybody(self) -> list[str]:
        """Names of all processes."""
        return [*(part.name for part in self.parts), *(server.name for server in self._servers)]

    async def _missing(self, names: Collection[str]) -> list[str]:
        """Who of them cannot do its work now."""
        services = [part for part in self.parts if part.name in names]
        servers = [server for server in self._servers if server.name in names]
        at_work = await asyncio.gather(
            *map(self._at_work, services), *(asyncio.to_thread(server.ready) for server in servers)
        )
        asked = [*(part.name for part in services), *(server.name for server in servers)]
        missing = []
        for name, well in zip(asked, at_work, strict=True):
            if well:
                self.supervisor.mark_ready(name, self.supervisor.pid(name))
            else:
                missing.append(name)
        return missing

    async def drain(self, name: str) -> None:
        """Takes a service out of use, publicly. Raises `Unavailable` where it cannot be asked."""
        try:
            await self._control(name).Drain(
                control_pb2.DrainRequest(instance_id=self._instance_id(name)), timeout=_ASK_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def undrain(self, name: str) -> bool:
        """Takes a drain back. False: it had nothing to wait for, and the process ends."""
        request = control_pb2.UndrainRequest(instance_id=self._instance_id(name))
        try:
            await self._control(name).Undrain(request, timeout=_PATIENT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    def _control(self, name: str) -> control_pb2_grpc.ControlStub:
        return control_pb2_grpc.ControlStub(self._channels[name])

    def _instance_id(self, name: str) -> str:
        return f"{name}-{self.mark}"

    async def model(self) -> str:
        """The one that is served."""
        response = await self._http.get(f"{self.frontends[0].url}/v1/models")
        return str(response.json()["data"][0]["id"])

    async def metrics(self, part: Part, timeout_s: float = _PATIENT_S) -> Metrics:
        """Of a service. Raises `httpx.HTTPError` while it does not answer."""
        response = await self._http.get(f"http://{_HOST}:{part.metrics_port}/metrics", timeout=timeout_s)
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                names = [sample.name]
                if "outcome" in sample.labels:
                    names.append(f"{sample.name} {sample.labels['outcome']}")
                for name in names:
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    async def _at_work(self, part: Part) -> bool:
        try:
            answer = await health_pb2_grpc.HealthStub(self._channels[part.name]).Check(
                health_pb2.HealthCheckRequest(), timeout=_ASK_S, wait_for_ready=True
            )
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                return False
            metrics = await self.metrics(part, _ASK_S)
        except (grpc.aio.AioRpcError, httpx.HTTPError):
            return False
        return metrics["tokenmill_discovery_stale"] == 0 and metrics["tokenmill_bus_connected"] == 1


def marked_processes(mark: str) -> dict[int, str]:
    """Everything alive that a run has started: pid -> command line."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return found


def _advertising_its_link(spec: ChildSpec, parts: Sequence[Part]) -> ChildSpec:
    linked = any(part.name == spec.name and part.role != "frontend" for part in parts)
    return replace(spec, env={**(spec.env or {}), "TOKENMILL_ADVERTISE": _LINK_HOST}) if linked else spec
