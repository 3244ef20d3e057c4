"""`tokenmill chaos`: proves on a deployment of its own that nothing is lost when parts die."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from cli.chaos.plan import FAULTS, Parts, chosen
from cli.chaos.report import Report
from cli.chaos.run import Course, run
from cli.chaos.scenarios import SCENARIOS, Scenario
from cli.chaos.sim_answers import SimAnswers
from cli.chaos.suite import Suite
from cli.sections import ALL_SECTIONS
from cli.tables import print_table
from cli.up.plan import make_plan
from controlplane.deployment import RunFolder
from controlplane.errors import SettingsError, Unsupported
from controlplane.settings import CommonSettings, Loaded, load
from controlplane.telemetry import configure_logging
from engines.models import DEMO, resolve_model
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
    *("--prefill", "2", "--decode", "2", "--port", "0"),
    # Short, so that a look for leaks need not wait.
    *("--kv-lease-s", "10", "--placement-ttl-s", "15", "--drain-timeout-s", "10"),
)
_SIM_DEFAULTS = ("--engine", "sim")
_VLLM_DEFAULTS = ("--engine", "vllm", "--prefill", "1", "--dtype", "float32", "--max-batched-tokens", "512")
"""Greedy answers stay the same from one worker to another in float32."""
_AFTER_LEASES_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments, settings = _parser().parse_known_args(sys.argv[2:] if argv is None else argv)
    if sys.platform != "linux":
        raise Unsupported("tokenmill chaos needs Linux: it sets limits of running processes and uses 127.0.0.2")
    scenario = SCENARIOS[arguments.scenario]
    real = scenario is SCENARIOS["real-model"]
    defaults = (*_DEFAULTS, *(_VLLM_DEFAULTS if real else _SIM_DEFAULTS))
    loaded = load(ALL_SECTIONS, [*defaults, *settings], os.environ, prog="tokenmill chaos", description=_DESCRIPTION)
    common, engine = loaded.get(CommonSettings), loaded.get(EngineSettings)
    _check(engine, real)
    configure_logging(replace(common, log_level="error"), service="chaos")
    with ExitStack() as stack:
        folder = RunFolder.claim(f"{common.deployment}-chaos")
        stack.callback(folder.remove)
        plan = make_plan(loaded, resolve_model(engine.model or DEMO) if real else "", folder.path, os.environ)
        counts = {"router": arguments.routers, "frontend": arguments.frontends}
        suite = Suite(plan, counts, scenario.engine_faults, folder.path, secrets.token_hex(3), network=scenario.network)
        if arguments.logs:
            stack.callback(_keep, folder.path / "logs", Path(arguments.logs))
        course = _course(arguments, scenario, loaded, suite.roles)
        report = asyncio.run(run(suite, course, None if real else SimAnswers(engine.seed), _say))
    _show(report, arguments)
    return 0 if report.good else 1


def _check(engine: EngineSettings, real: bool) -> None:
    wanted = "vllm" if real else "sim"
    if engine.engine != wanted:
        raise SettingsError(
            f"--engine {engine.engine} does not go with this scenario, which is about {wanted}; --scenario real-model "
            "is for vllm, the others are for sim",
            param="engine.engine",
        )
    if engine.model and not real:
        raise SettingsError("the right answers of sim are known without a --model only", param="engine.model")


def _course(arguments: argparse.Namespace, scenario: Scenario, loaded: Loaded, parts: Parts) -> Course:
    faults = tuple(filter(scenario.can_make, chosen(arguments.faults or scenario.faults, parts)))
    if arguments.lasts is not None:
        lasts = arguments.lasts
        faults = tuple(replace(one, longest_s=lasts, shortest_s=lasts) if one.longest_s else one for one in faults)
    if not faults:
        raise SettingsError("--faults: this scenario and these parts leave none to choose from", param="faults")
    leases_s = max(loaded.get(EngineSettings).kv_lease_s, loaded.get(RouterSettings).placement_ttl_s)
    return Course(
        seed=arguments.seed,
        seconds=arguments.minutes * 60,
        rate_s=arguments.rate or scenario.rate_s,
        mix=scenario.mix,
        faults=faults,
        strikes=arguments.strikes,
        spacing_s=scenario.spacing_s,
        apart=arguments.apart,
        most_lease_s=leases_s + _AFTER_LEASES_S,
        recovery_s=scenario.recovery_s,
    )


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
    scenarios = "\n".join(f"  {name:14}{scenario.about}" for name, scenario in SCENARIOS.items())
    names = ", ".join(fault.name for fault in FAULTS)
    faults = textwrap.fill(names, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    parser = argparse.ArgumentParser(
        prog="tokenmill chaos",
        description=_DESCRIPTION,
        epilog=f"scenarios:\n{scenarios}\n\nfaults:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=2.0, metavar="N", help="how long [default %(default)g]")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="same seed: same faults [default %(default)s]")
    parser.add_argument("--scenario", choices=SCENARIOS, default="mixed", help="[default %(default)s]")
    parser.add_argument("--faults", metavar="LIST", help="names or patterns, comma separated; see below")
    parser.add_argument("--lasts", type=float, metavar="SECONDS", help="how long each fault that lasts is to last")
    parser.add_argument("--apart", action="store_true", help="no fault while another lasts: for figures of each")
    parser.add_argument("--strikes", type=int, default=4, metavar="N", help="faults in a round [default %(default)s]")
    parser.add_argument("--rate", type=float, metavar="N", help="requests a second")
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="[default %(default)s]")
    parser.add_argument("--frontends", type=int, default=2, metavar="N", help="[default %(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the report for programs there")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the services' logs there")
    return parser
