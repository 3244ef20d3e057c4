"""`tokenmill status`: who runs, in which role and state, and how busy."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from rich.text import Text

from cli.arguments import add_deployment, add_etcd, running_here
from cli.tables import print_table
from controlplane.bus import Bus
from controlplane.discovery import Discovery
from controlplane.errors import Unavailable
from controlplane.instances import Instance, State
from controlplane.kv_wire import load_from_bytes, load_subject
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from kvcache.load import LoadReport

__all__ = ["main"]

_CONNECT_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 1.5
"""A worker reports its load each second."""
_ORDER = ("frontend", "router", "prefill", "decode")
_COLUMNS = ["instance", "role", "state", "pid", "address", "model", "load"]
_STYLES = {State.READY: "green", State.STARTING: "yellow", State.DRAINING: "yellow"}
_LOAD_FIELDS = (
    "running_requests", "waiting_requests", "queued_prefill_tokens", "kv_used_blocks", "kv_total_blocks",
    "kv_leased_blocks", "held_blocks", "step_time_us", "steps",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 1 when nothing runs."""
    arguments = _parser().parse_args(argv)
    # Quiet, and away from standard output.
    configure_logging(CommonSettings(log_level="error"), service="status")
    etcd, nats = _endpoints(arguments)
    instances, loads = asyncio.run(_look(etcd, nats, arguments.deployment))
    if not instances:
        raise Unavailable(f"nothing of deployment {arguments.deployment!r} is registered in etcd at {etcd}")
    if arguments.json:
        print(json.dumps({"instances": [_as_json(one, loads.get(one.instance_id)) for one in instances]}, indent=2))
    else:
        print_table(_COLUMNS, [_as_row(one, loads.get(one.instance_id)) for one in instances])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmill status",
        description="Shows the instances of a deployment: role, state, address, model and load. It finds etcd and NATS "
        "through the deployment that runs on this machine, or where it is told.",
    )
    add_deployment(parser)
    add_etcd(parser)
    parser.add_argument(
        "--nats",
        default=os.environ.get("TOKENMILL_NATS"),
        metavar="URL",
        help="hear loads from this NATS [env TOKENMILL_NATS]; without one none are shown",
    )
    parser.add_argument("--json", action="store_true", help='print {"instances": [...]}, for programs')
    return parser


def _endpoints(arguments: argparse.Namespace) -> tuple[str, str | None]:
    if arguments.etcd is not None:
        return arguments.etcd, arguments.nats
    state = running_here(arguments.deployment)
    return state.etcd, arguments.nats or state.nats


async def _look(etcd: str, nats: str | None, deployment: str) -> tuple[list[Instance], Mapping[str, LoadReport]]:
    registry = CollectorRegistry()
    discovery = await Discovery.connect(etcd, deployment, registry, timeout_s=_CONNECT_TIMEOUT_S)
    try:
        instances = sorted(discovery.instances.values(), key=_order)
    finally:
        await discovery.close()
    workers = {one.instance_id for one in instances if one.role and one.state is not State.STARTING}
    if nats is None or not workers:
        return instances, {}
    return instances, await _loads(nats, deployment, workers, registry)


async def _loads(
    nats: str, deployment: str, workers: set[str], registry: CollectorRegistry
) -> Mapping[str, LoadReport]:
    """The next report of each worker; of those that say nothing in time, none."""
    heard: dict[str, LoadReport] = {}
    all_heard = asyncio.Event()

    def on_message(subject: str, data: bytes) -> None:
        report = load_from_bytes(data)
        heard[report.instance_id] = report
        if workers <= heard.keys():
            all_heard.set()

    bus = await Bus.connect(nats, registry)
    try:
        await bus.subscribe(load_subject(deployment, "*"), on_message, lambda: None)
        await asyncio.wait([asyncio.create_task(all_heard.wait())], timeout=_LOAD_TIMEOUT_S)
    finally:
        await bus.close()
    return heard


def _order(instance: Instance) -> tuple[int, str]:
    known = instance.service in _ORDER
    return (_ORDER.index(instance.service) if known else len(_ORDER), instance.instance_id)


def _as_json(instance: Instance, load: LoadReport | None) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(instance)
    described["load"] = None if load is None else {name: getattr(load, name) for name in _LOAD_FIELDS}
    return described


def _as_row(instance: Instance, load: LoadReport | None) -> list[str | Text]:
    return [
        instance.instance_id,
        instance.role or instance.service,
        Text(instance.state.value, style=_STYLES.get(instance.state, "red")),
        str(instance.pid),
        f"http{'s' if instance.tls else ''}://{instance.http_address}" if instance.http_address else instance.address,
        instance.model.name if instance.model else "",
        instance.progress or _load_text(load),
    ]


def _load_text(load: LoadReport | None) -> str:
    if load is None:
        return ""
    return (
        f"{load.running_requests} running, {load.waiting_requests} waiting, "
        f"KV {load.kv_used_blocks}/{load.kv_total_blocks} blocks"
    )
