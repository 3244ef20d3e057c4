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
from collections.abc import Callable, Iterator, Sequence
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


SHORT_TOKENS = 8
"""Length of the answers that show what a request costs whatever its length."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load: CPU seconds by service, and what the load generator saw."""

    cpu_s: dict[str, float]
    seen: dict[str, Any]

    def us_a_request(self, service: str) -> float:
        """Microseconds of CPU a request, its tokens included."""
        return 1e6 * self.cpu_s[service] / int(self.seen["requests"])


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs of one variant: with answers of the full length, and with short ones."""

    full: list[Run]
    short: list[Run]
    output_tokens: int

    def us_a_token(self, service: str) -> list[float]:
        """All CPU time over all output tokens, for each full run, sorted."""
        return sorted(run.us_a_request(service) / self.output_tokens for run in self.full)

    def parts(self, service: str) -> tuple[float, float]:
        """Microseconds a request, and for each further token: a line through the medians of short and full runs."""
        short, full = (statistics.median(run.us_a_request(service) for run in runs) for runs in (self.short, self.full))
        a_token = (full - short) / (self.output_tokens - SHORT_TOKENS)
        return short - SHORT_TOKENS * a_token, a_token


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
    options = parser.parse_args()
    report({name: measure(name, prefill, options) for name, prefill in VARIANTS.items()}, options)


def measure(name: str, prefill: int, options: argparse.Namespace) -> Measured:
    """Starts a suite, warms it up, and measures it `options.runs` times with each length of answer."""
    with suite(prefill, options.time_scale) as instances:
        (frontend,) = (instance for instance in instances if instance["service"] == "frontend")
        url = f"http://{frontend['http_address']}"
        load = Load(url, options.streams, options.input_tokens)
        load.send(options.streams * 4, options.output_tokens, seed=0)
        measured = Measured([], [], options.output_tokens)
        for number in range(1, options.runs + 1):
            print(f"{name}: run {number} of {options.runs}", file=sys.stderr)
            measured.full.append(measure_once(instances, load, options.requests, options.output_tokens, number))
            measured.short.append(measure_once(instances, load, options.requests, SHORT_TOKENS, -number))
        return measured


def measure_once(instances: Sequence[dict[str, Any]], load: Load, requests: int, output_tokens: int, seed: int) -> Run:
    """CPU time used by each service while the load ran."""
    before = cpu_s(instances)
    seen = load.send(requests, output_tokens, seed)
    after = cpu_s(instances)
    if seen["completion_tokens"] != requests * output_tokens:
        sys.exit(f"{seen['completion_tokens']} tokens came, not {requests * output_tokens}")
    used = {service: after[service] - before[service] for service in before}
    return Run({**used, "all": sum(used.values())}, seen)


@dataclass(frozen=True, slots=True)
class Load:
    """The load generator, a process of its own."""

    url: str
    streams: int
    input_tokens: int

    def send(self, requests: int, output_tokens: int, seed: int) -> dict[str, Any]:
        """One run of it; no two seeds share a prompt."""
        flags = {"requests": requests, "streams": self.streams, "seed": seed}
        flags |= {"input-tokens": self.input_tokens, "output-tokens": output_tokens}
        command = [sys.executable, LOAD_GENERATOR, self.url, "--model", "sim"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        seen: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return seen


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


def _tokenmill(*arguments: str) -> str:
    """Runs the command quietly; what it says on standard error is shown when it fails."""
    command = [TOKENMILL, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if ran.returncode != 0:
        sys.exit(f"{ran.stderr}`tokenmill {' '.join(arguments)}` failed")
    return ran.stdout


def report(measured: dict[str, Measured], options: argparse.Namespace) -> None:
    """The medians of each variant, service by service."""
    console = Console(highlight=False, width=120)
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"CPU time, median of {options.runs} runs: {options.streams} streams, {options.input_tokens} tokens in, "
        f"{options.output_tokens} out"
    )
    for name in ("", "service"):
        table.add_column(name)
    for name in (
        "us/token",
        "(least-most)",
        "= us/request",
        "+ us/token",
        f"of {TARGET_US_A_TOKEN:.0f} us",
        "of aggregated",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    aggregated = statistics.median(measured["aggregated"].us_a_token("all"))
    for variant, one in measured.items():
        for service in one.full[0].cpu_s:
            us = one.us_a_token(service)
            median = statistics.median(us)
            a_request, a_token = one.parts(service)
            ratios = (f"{median / TARGET_US_A_TOKEN:.2f}", f"{median / aggregated:.2f}") if service == "all" else ()
            spread = f"{us[0]:.1f}-{us[-1]:.1f}"
            table.add_row(variant, service, f"{median:.1f}", spread, f"{a_request:.0f}", f"{a_token:.1f}", *ratios)
        table.add_section()
    console.print(table)
    for variant, one in measured.items():
        console.print(f"{variant}: {_seen(one.full)}", soft_wrap=True)


def _seen(runs: Sequence[Run]) -> str:
    """What the load generator saw: medians over the runs."""

    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(run.seen) for run in runs)

    return (
        f"{median(lambda seen: seen['completion_tokens'] / seen['elapsed_s']):,.0f} tokens/s, "
        f"TTFT p50 {median(lambda seen: 1e3 * seen['ttft_s']):.0f} ms, "
        f"{median(lambda seen: seen['completion_tokens'] / seen['events']):.1f} tokens an SSE event, "
        f"{median(lambda seen: seen['prompt_tokens'] / seen['requests']):.0f} tokens a prompt, "
        f"{median(lambda seen: seen['remote_tokens'] / seen['prompt_tokens']):.0%} of them prefilled remotely"
    )


if __name__ == "__main__":
    main()
