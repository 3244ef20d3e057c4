"""CPU time of every service, a request and an output token, with the whole suite running on a simulated engine.

The suite is started by its own supervisor, the load comes from a process that is not counted, and CPU time is what the
kernel says each service process used between the first request and the last. Rates on a busy machine mean little;
microseconds of CPU do not change much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
LOAD_GENERATOR = str(Path(__file__).parent / "load_generator.py")
START_TIMEOUT_S = 120.0

TARGET_US_A_TOKEN = 25.0
"""Over all services together; the first goal of the project."""

VARIANTS = {"aggregated": 0, "P/D apart": 1}
"""Number of prefill workers, with one decode worker."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load: CPU seconds by service, and what the load generator saw."""

    cpu_s: dict[str, float]
    seen: dict[str, Any]

    def us_a_token(self, service: str) -> float:
        """Microseconds of CPU an output token."""
        return 1e6 * self.cpu_s[service] / int(self.seen["completion_tokens"])

    def ms_a_request(self, service: str) -> float:
        """Milliseconds of CPU a request, its tokens included."""
        return 1e3 * self.cpu_s[service] / int(self.seen["requests"])


def main() -> None:
    """Measures each variant and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs a variant; the median is shown [default %(default)s]")
    parser.add_argument("--requests", type=int, default=2048, help="requests a run [default %(default)s]")
    parser.add_argument("--streams", type=int, default=64, help="requests at a time [default %(default)s]")
    parser.add_argument("--input-tokens", type=int, default=512, help="tokens of a prompt [default %(default)s]")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens of an answer [default %(default)s]")
    parser.add_argument(
        "--time-scale", default="0", help="of the simulated engine; 0: no waiting [default %(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements instead of a table")
    options = parser.parse_args()
    measured = {name: measure(prefill, options) for name, prefill in VARIANTS.items()}
    if options.json:
        print(json.dumps({name: [{"cpu_s": run.cpu_s, **run.seen} for run in runs] for name, runs in measured.items()}))
    else:
        report(measured, options)


def measure(prefill: int, options: argparse.Namespace) -> list[Run]:
    """Starts a suite, warms it up, and measures it `options.runs` times."""
    with suite(prefill, options.time_scale) as instances:
        (frontend,) = (instance for instance in instances if instance["service"] == "frontend")
        url = f"http://{frontend['http_address']}"
        send(url, options, requests=options.streams * 4, seed=0)
        return [measure_once(instances, url, options, seed) for seed in range(1, options.runs + 1)]


def measure_once(instances: Sequence[dict[str, Any]], url: str, options: argparse.Namespace, seed: int) -> Run:
    """CPU time used by each service while the load ran."""
    before = cpu_s(instances)
    seen = send(url, options, requests=options.requests, seed=seed)
    after = cpu_s(instances)
    if seen["completion_tokens"] != options.requests * options.output_tokens:
        sys.exit(f"{seen['completion_tokens']} tokens came, not {options.requests * options.output_tokens}")
    used = {service: after[service] - before[service] for service in before}
    return Run({**used, "all": sum(used.values())}, seen)


def cpu_s(instances: Sequence[dict[str, Any]]) -> dict[str, float]:
    """CPU seconds used so far by service, engines in processes of their own included."""
    total: dict[str, float] = {}
    for instance in instances:
        process = psutil.Process(instance["pid"])
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        used = sum(one.user + one.system for one in times)
        total[instance["service"]] = total.get(instance["service"], 0.0) + used
    return total


@contextmanager
def suite(prefill: int, time_scale: str) -> Iterator[list[dict[str, Any]]]:
    """A running deployment of its own; yields its instances."""
    deployment = f"bench-{uuid.uuid4().hex[:8]}"
    shape = ["--prefill", str(prefill), "--decode", "1", "--engine", "sim", "--time-scale", time_scale, "--port", "0"]
    try:
        _tokenmill("up", "--detach", "--deployment", deployment, *shape)
        yield json.loads(_tokenmill("status", "--json", "--deployment", deployment))["instances"]
    finally:
        _tokenmill("down", "--deployment", deployment)


def send(url: str, options: argparse.Namespace, *, requests: int, seed: int) -> dict[str, Any]:
    """One run of the load generator."""
    counts = {"requests": requests, "streams": options.streams, "seed": seed}
    counts |= {"input-tokens": options.input_tokens, "output-tokens": options.output_tokens}
    flags = [text for name, value in counts.items() for text in (f"--{name}", str(value))]
    output = subprocess.run(
        [sys.executable, LOAD_GENERATOR, url, "--model", "sim", *flags], stdout=subprocess.PIPE, check=True
    ).stdout
    seen: dict[str, Any] = json.loads(output)
    return seen


def _tokenmill(*arguments: str) -> str:
    command = [TOKENMILL, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=START_TIMEOUT_S).stdout


def report(measured: dict[str, list[Run]], options: argparse.Namespace) -> None:
    """The median run of each variant, service by service."""
    title = f"{options.streams} streams, {options.input_tokens} tokens in, {options.output_tokens} out, "
    table = Table(title=f"{title}median of {options.runs}", title_justify="left")
    for name, justify in (("", "left"), ("service", "left"), *[(name, "right") for name in COLUMNS]):
        table.add_column(name, justify="right" if justify == "right" else "left")
    aggregated = statistics.median(run.us_a_token("all") for run in measured["aggregated"])
    for variant, runs in measured.items():
        for service in runs[0].cpu_s:
            us = [run.us_a_token(service) for run in runs]
            ms = statistics.median(run.ms_a_request(service) for run in runs)
            table.add_row(
                variant if service == next(iter(runs[0].cpu_s)) else "",
                service,
                f"{statistics.median(us):.1f}",
                f"{min(us):.1f}-{max(us):.1f}",
                f"{ms:.2f}",
                f"{statistics.median(us) / TARGET_US_A_TOKEN:.2f}" if service == "all" else "",
                f"{statistics.median(us) / aggregated:.2f}" if service == "all" else "",
            )
        table.add_section()
    console = Console()
    console.print(table)
    for variant, runs in measured.items():
        rate = statistics.median(run.seen["completion_tokens"] / run.seen["elapsed_s"] for run in runs)
        ttft = statistics.median(run.seen["ttft_s"] for run in runs)
        a_event = statistics.median(run.seen["completion_tokens"] / run.seen["events"] for run in runs)
        remote = runs[0].seen["remote_tokens"] / runs[0].seen["prompt_tokens"]
        console.print(
            f"{variant}: {rate:,.0f} tokens/s, TTFT p50 {ttft * 1e3:.0f} ms, {a_event:.1f} tokens an SSE event, "
            f"{runs[0].seen['prompt_tokens'] / runs[0].seen['requests']:.0f} tokens a prompt, "
            f"{remote:.0%} of them prefilled remotely",
            highlight=False,
        )


COLUMNS = ("CPU us a token", "least-most", "CPU ms a request", "to the target", "to aggregated")


if __name__ == "__main__":
    main()
