"""`tokenmill chaos`: proves on a deployment of its own that nothing is lost when parts die."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli.chaos.asks import LONG_ANSWERS, MIXED, Mix
from cli.chaos.plan import FAULTS, chosen
from cli.chaos.report import Report
from cli.chaos.run import Course, run
from cli.chaos.sim_answers import SimAnswers
from cli.chaos.suite import Suite
from cli.sections import ALL_SECTIONS
from cli.tables import print_table
from cli.up.plan import make_plan
from controlplane.deployment import RunFolder
from controlplane.errors import SettingsError
from controlplane.settings import CommonSettings, load
from controlplane.telemetry import configure_logging
from engines.settings import EngineSettings
from services.router.settings import RouterSettings

__all__ = ["main"]

_DESCRIPTION = """\
Starts a deployment of its own (the simulated engine, two of each service), keeps asking it, makes its parts fail in
every way it knows, and holds every answer against the one right one. Exit code 0: no answer was wrong, lost or hung,
nothing leaked, and everything came back.

  tokenmill chaos --minutes 5 --seed 1
  tokenmill chaos --faults 'kill-*,freeze-decode' --json report.json
  tokenmill chaos --scenario decode-kill --markdown

Settings of services (`tokenmill up --help`) may be given, too: --decode 4 --time-scale 5."""

_DEFAULTS = (
    "--engine", "sim", "--time-scale", "1", "--prefill", "2", "--decode", "2", "--kv-lease-s", "10",
    "--placement-ttl-s", "15", "--drain-timeout-s", "10", "--port", "0",
)  # fmt: skip
"""Leases are short, so that a look for leaks need not wait."""
_AFTER_LEASES_S = 10.0


@dataclass(frozen=True, slots=True)
class _Scenario:
    """One fault, again and again, with time to recover in between."""

    faults: str
    mix: Mix
    rate_s: float
    spacing_s: float
    network: bool = False
    engine_faults: Mapping[str, str] = field(default_factory=lambda: {"prefill": "hang", "decode": "hang"})


_WITH_BAD_KV = "kill-prefill,kill-decode,hang-up-clients"
_SCENARIOS = {
    "mixed": _Scenario("*", MIXED, 8.0, 4.0, network=True),
    "decode-kill": _Scenario("kill-decode", LONG_ANSWERS, 6.0, 6.0),
    "router-kill": _Scenario("kill-router", MIXED, 8.0, 6.0),
    "etcd-away": _Scenario("away-etcd", MIXED, 8.0, 6.0),
    "restarts": _Scenario("stop-*,drain-*", MIXED, 8.0, 6.0),
    "corrupt-kv": _Scenario(_WITH_BAD_KV, MIXED, 8.0, 6.0, engine_faults={"prefill": "corrupt-block"}),
    "late-kv": _Scenario(_WITH_BAD_KV, MIXED, 8.0, 6.0, engine_faults={"decode": "late-read"}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments, settings = _parser().parse_known_args(sys.argv[2:] if argv is None else argv)
    scenario = _SCENARIOS[arguments.scenario]
    loaded = load(
        ALL_SECTIONS, [*_DEFAULTS, *settings], os.environ, prog="tokenmill chaos", description=_DESCRIPTION
    )  # fmt: skip
    common, engine = loaded.get(CommonSettings), loaded.get(EngineSettings)
    if engine.engine != "sim":
        raise SettingsError("tokenmill chaos knows the right answers of --engine sim only", param="engine.engine")
    configure_logging(replace(common, log_level="error"), service="chaos")
    with ExitStack() as stack:
        folder = RunFolder.claim(f"{common.deployment}-chaos")
        stack.callback(folder.remove)
        plan = make_plan(loaded, engine.model, folder.path, os.environ)
        counts = {"router": arguments.routers, "frontend": arguments.frontends}
        suite = Suite(plan, counts, scenario.engine_faults, folder.path, secrets.token_hex(3), network=scenario.network)
        leases_s = max(engine.kv_lease_s, loaded.get(RouterSettings).placement_ttl_s)
        faults = chosen(arguments.faults or scenario.faults, suite.roles)
        course = Course(
            seed=arguments.seed,
            seconds=arguments.minutes * 60,
            rate_s=arguments.rate or scenario.rate_s,
            mix=scenario.mix,
            faults=[fault for fault in faults if scenario.network or not fault.network],
            strikes=arguments.strikes,
            spacing_s=scenario.spacing_s,
            most_lease_s=leases_s + _AFTER_LEASES_S,
        )
        if arguments.logs:
            stack.callback(_keep, folder.path / "logs", Path(arguments.logs))
        report = asyncio.run(run(suite, course, lambda: SimAnswers(engine.seed), _say))
    _show(report, arguments)
    return 0 if report.good else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keep(logs: Path, where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for file in logs.iterdir():
        (where / file.name).write_bytes(file.read_bytes())


def _show(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.as_json(), indent=2) + "\n")
    if arguments.markdown:
        print(report.markdown())
    else:
        heads, lines = report.table()
        print_table(heads, [list(line) for line in lines])
    print()
    for finding in report.findings():
        print(finding)
    print(report.summary())


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(fault.name for fault in FAULTS)
    parser = argparse.ArgumentParser(
        prog="tokenmill chaos",
        description=_DESCRIPTION,
        epilog=f"faults: {names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=2.0, metavar="N", help="how long [default %(default)g]")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="same seed: same faults [default %(default)s]")
    parser.add_argument("--scenario", choices=_SCENARIOS, default="mixed", help="[default %(default)s]")
    parser.add_argument("--faults", metavar="LIST", help="names or patterns, comma separated; see below")
    parser.add_argument("--strikes", type=int, default=4, metavar="N", help="faults in a round [default %(default)s]")
    parser.add_argument("--rate", type=float, metavar="N", help="requests a second")
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="[default %(default)s]")
    parser.add_argument("--frontends", type=int, default=2, metavar="N", help="[default %(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the report for programs there")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the services' logs there")
    return parser
