"""Writes the tables of docs/routing.md that compare the policies, from simulations of public traces.

    python benchmarks/routing_tables.py conversation=mooncake_conversation_trace.jsonl synthetic=...jsonl

The traces are those of kvcache-ai/Mooncake (FAST25-release/traces); they are not part of this repository. Everything
follows from the seed, so the tables change only with the code. Without --write they go to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engines.sim.profile import profile
from services.router.policies import POLICIES
from services.router.settings import RouterSettings
from simulator.measures import Result
from simulator.replay import PATIENT, Cluster, Limits, replay
from simulator.trace import read_trace, spread

PAGE = Path(__file__).resolve().parent.parent / "docs" / "routing.md"
BEGIN, END = "<!-- written by benchmarks/routing_tables.py -->", "<!-- end of what it writes -->"
BASE = "round_robin"
SPEEDS = (0.5, 1.0, 1.5)
SHAPES = {"8 workers": (0, 8), "6 prefill + 2 decode workers": (6, 2)}
CLUSTERS = (("h100x2-70b-fp8", "8 workers"), ("h100-8b", "8 workers"), ("h100-8b", "6 prefill + 2 decode workers"))
"""Profile and shape. The larger model's workers are half busy at the trace's own speed and overloaded at 1.5x; the
smaller model's are never full. Eight of the former, split, have too little KV room for decode to be compared at 1x."""
SEED = 1
COLUMNS = (
    "speed", "policy", "TTFT mean, s", "of round robin", "p99, s", "ITL p99, ms", "hit rate", "max/mean", "good",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation."""

    profile: str
    trace: str
    path: Path
    shape: str
    speed: float
    policy: str


def main() -> None:
    """Runs every simulation and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--limit", type=int, default=0, help="only the first requests, to try it out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options = parser.parse_args()
    traces = {name: Path(path) for name, _, path in (one.partition("=") for one in options.traces)}
    cells = [
        Cell(name, trace, path, shape, speed, policy)
        for name, shape in CLUSTERS
        for trace, path in traces.items()
        for speed in SPEEDS
        for policy in POLICIES
    ]
    results: dict[Cell, Result] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell, result in zip(cells, pool.map(simulate, cells, [options.limit] * len(cells)), strict=True):
            results[cell] = result
            print(f"{len(results)} of {len(cells)}: {cell}", file=sys.stderr)
    text = "\n".join(tables(results))
    if options.limit:
        text = f"Of the first {options.limit:,} requests of each trace.\n\n{text}"
    if not options.write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not rest or not tail:
        sys.exit(f"{PAGE} has no lines {BEGIN} and {END}")
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")


def simulate(cell: Cell, limit: int) -> Result:
    """One cell."""
    prefill, decode = SHAPES[cell.shape]
    return replay(
        spread(read_trace(cell.path, limit), SEED, cell.speed),
        Cluster(profile=profile(cell.profile), prefill=prefill, decode=decode),
        RouterSettings(policy=cell.policy, **PATIENT),
        seed=SEED,
        limits=Limits(),
    )


def tables(results: dict[Cell, Result]) -> Iterator[str]:
    """Markdown, a table for each profile, trace and shape."""
    for name, trace, shape in dict.fromkeys((cell.profile, cell.trace, cell.shape) for cell in results):
        about = profile(name)
        yield f"**{trace}, {shape}**: {about.model}; each worker {about.hardware}, {about.kv_tokens:,} tokens of KV\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        rows = {
            cell: one for cell, one in results.items() if (cell.profile, cell.trace, cell.shape) == (name, trace, shape)
        }
        for cell, one in rows.items():
            peers = {other.policy: result for other, result in rows.items() if other.speed == cell.speed}
            yield _row(cell, one, peers[BASE], list(peers.values()))
        yield ""


def _row(cell: Cell, one: Result, base: Result, peers: Sequence[Result]) -> str:
    mean = f"{one.ttft.mean / 1000:.2f}"
    if one.ttft.mean == min(peer.ttft.mean for peer in peers):
        mean = f"**{mean}**"
    values = (
        f"{cell.speed:g}x",
        f"`{cell.policy}`",
        mean,
        f"{one.ttft.mean / base.ttft.mean:.2f}",
        f"{one.ttft.p99 / 1000:.1f}",
        f"{one.itl.p99:.0f}",
        f"{one.hit_rate:.1%}",
        f"{one.load_max_over_mean:.2f}",
        f"{one.good_share:.1%}",
    )
    return f"| {' | '.join(values)} |"


if __name__ == "__main__":
    main()
