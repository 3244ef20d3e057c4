"""`tokenmill simulate`: replay a trace through the router and simulated workers, and compare policies."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.tables import print_table
from controlplane.errors import SettingsError
from controlplane.settings import load
from engines.sim.profile import profile, profile_names
from services.router.policies import POLICIES, Parameters
from services.router.settings import RouterSettings
from simulator.decisions import read_decisions, replay_decisions
from simulator.measures import Result
from simulator.replay import PATIENT, Cluster, Limits, replay
from simulator.report import as_html, as_json
from simulator.trace import read_trace, spread

__all__ = ["main"]

_COLUMNS = [
    "policy", "TTFT mean", "p50", "p99", "ITL mean", "p99", "E2E mean", "p99", "hit rate", "max/mean", "good/s", "good",
    "refused", "speed",
]  # fmt: skip
_PROFILE = "h100x2-70b-fp8"
"""The public traces keep eight such workers about half busy: enough that it matters where a request goes."""
_MOST_SHOWN = 20
_PROGRESS_EACH = 64
"""Requests between two looks at the clock."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments, rest = _parser().parse_known_args(sys.argv[2:] if argv is None else argv)
    loaded = load({"router": RouterSettings}, rest, os.environ, prog="tokenmill simulate", description="")
    settings = loaded.get(RouterSettings)
    if arguments.replay_decisions:
        return _replay_decisions(arguments.replay_decisions, settings.parameters)
    if arguments.trace is None:
        raise SettingsError("name a trace to replay, or a log of decisions with --replay-decisions")
    policies = _policies(arguments.policy)
    cluster = _cluster(arguments)
    limits = Limits(arguments.ttft_limit_ms, arguments.itl_limit_ms)
    unset = {name: value for name, value in PATIENT.items() if loaded.sources[f"router.{name}"] == "default"}
    settings = replace(settings, **unset)
    if arguments.speed <= 0:
        raise SettingsError(f"--speed is {arguments.speed:g}; it must be more than 0")
    arrivals = spread(read_trace(arguments.trace, arguments.limit), arguments.seed, arguments.speed)
    results: list[Result] = []
    with _progress(policies, len(arrivals)) as bars:
        for policy in policies:
            began = time.perf_counter()
            result = replay(
                arrivals,
                cluster,
                replace(settings, policy=policy),
                seed=arguments.seed,
                limits=limits,
                on_progress=bars(policy),
            )
            result.wall_s = time.perf_counter() - began
            results.append(result)
    print_table(_COLUMNS, [list(map(str, _row(result))) for result in results])
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(results), indent=2) + "\n", encoding="utf-8")
    if arguments.report:
        title = f"{arguments.trace.name} at {arguments.speed:g}x on {_described(cluster, arguments.profile)}"
        arguments.report.write_text(as_html(title, results, limits), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmill simulate",
        allow_abbrev=False,
        description="Replays a request trace through the router's own code and simulated workers in virtual time.",
        epilog="Every setting of the router may be given, too, e.g. --remote-prefill-min-tokens 2048. Unless --queue-* "
        "flags say otherwise nobody is refused, so that all policies are measured by the same requests.",
    )
    parser.add_argument("trace", type=Path, nargs="?", help="a Mooncake .jsonl or an Azure .csv")
    parser.add_argument("--policy", default=",".join(POLICIES), metavar="A,B", help="policies [default %(default)s]")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="workers that compute prompts and generate [default 8]"
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="with --decode: workers that only compute prompts")
    parser.add_argument("--decode", type=int, metavar="N", help="with --prefill: workers that generate")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as the trace came")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N requests")
    parser.add_argument("--block-size", type=int, default=512, metavar="N", help="tokens a KV block; it divides 512")
    parser.add_argument(
        "--profile", default=_PROFILE, metavar="NAME",
        help=f"{', '.join(profile_names())}, or the path of a .toml [default %(default)s]",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of ties; same seed, same result")
    parser.add_argument("--ttft-limit-ms", type=float, default=Limits().ttft_ms, metavar="MS", help="for goodput")
    parser.add_argument("--itl-limit-ms", type=float, default=Limits().itl_ms, metavar="MS", help="for goodput")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with charts there (.html)")
    parser.add_argument(
        "--replay-decisions", type=Path, metavar="FILE",
        help="instead of a trace: make the decisions of a router's decisions_log again, and compare",
    )  # fmt: skip
    return parser


def _replay_decisions(path: Path, parameters: Parameters) -> int:
    """1 when any comes out otherwise."""
    agreement = replay_decisions(read_decisions(path), parameters)
    for difference in agreement.differing[:_MOST_SHOWN]:
        print(difference)
    print(
        f"{agreement.same} comparisons come out the same ({agreement.tied} of them ties), "
        f"{len(agreement.differing)} differ, {agreement.skipped} cannot be made again"
    )
    return 1 if agreement.differing else 0


def _policies(names: str) -> list[str]:
    policies = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        raise SettingsError(f"--policy is {names!r}; it must name some of {', '.join(POLICIES)}")
    return policies


def _cluster(arguments: argparse.Namespace) -> Cluster:
    apart = arguments.prefill is not None or arguments.decode is not None
    if apart and arguments.workers is not None:
        raise SettingsError("--workers is for workers that do both; give it or --prefill and --decode")
    if apart and (arguments.prefill is None or arguments.decode is None):
        raise SettingsError("--prefill and --decode go together")
    timing = profile(arguments.profile)
    if apart:
        return Cluster(
            profile=timing, prefill=arguments.prefill, decode=arguments.decode, block_size=arguments.block_size
        )
    workers = 8 if arguments.workers is None else arguments.workers
    return Cluster(profile=timing, decode=workers, block_size=arguments.block_size)


def _described(cluster: Cluster, name: str) -> str:
    shape = f"{cluster.prefill} prefill + {cluster.decode} decode" if cluster.prefill else f"{cluster.decode}"
    return f"{shape} workers {name} ({cluster.block_size}-token blocks)"


def _row(result: Result) -> tuple[str, ...]:
    ttft, itl, e2e = result.ttft, result.itl, result.e2e
    return (
        result.policy,
        f"{ttft.mean:,.0f} ms", f"{ttft.p50:,.0f}", f"{ttft.p99:,.0f}",
        f"{itl.mean:,.1f} ms", f"{itl.p99:,.1f}",
        f"{e2e.mean:,.0f} ms", f"{e2e.p99:,.0f}",
        f"{result.hit_rate:.1%}",
        f"{result.load_max_over_mean:.2f}",
        f"{result.goodput:.2f}",
        f"{result.good_share:.1%}",
        f"{result.refused:,}",
        f"{result.speedup:,.0f}x",
    )  # fmt: skip


@contextmanager
def _progress(policies: Sequence[str], requests: int) -> Iterator[Callable[[str], Callable[[int], None] | None]]:
    """A bar a policy on standard error, where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda policy: None
        return
    columns = TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {policy: bars.add_task(policy, total=requests) for policy in policies}

        def of(policy: str) -> Callable[[int], None]:
            def show(ended: int) -> None:
                if ended % _PROGRESS_EACH == 0 or ended == requests:
                    bars.update(tasks[policy], completed=ended)

            return show

        yield of
