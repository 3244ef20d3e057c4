"""Goodput under a burst: what the suite still answers in time when ten times as much is asked as it can do.

A suite on the simulated engine is first loaded with as many streams as its workers batch, which gives its best goodput:
answers a second whose first token came within the limit. Then requests arrive at ten times that rate, whatever becomes
of them, for as long. What is refused must cost next to nothing, and what is admitted must not wait in vain. The limit
is twice [router] queue_max_wait_s, the time in which a worker should have begun whatever was admitted: no queue can
keep a limit below its own bound, for one that is always full makes everybody wait about that long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
START_TIMEOUT_S = 120.0
PROFILE = "step_us = 50000\nprefill_us = 100\ndecode_us = 500\ncontext_us = 0\nmax_num_seqs = 16\n"
"""Slow enough that the engine, not this machine's processors, is what is short."""
TARGET = 0.9


@dataclass(slots=True)
class Seen:
    """What became of the requests of one run."""

    elapsed_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    """Of answers that were complete."""
    statuses: Counter[str] = field(default_factory=Counter)

    def goodput(self, limit_s: float) -> float:
        """Answers a second that began in time."""
        return sum(ttft <= limit_s for ttft in self.ttft_s) / self.elapsed_s


def main() -> None:
    """Measures both loads; fails when less than 90 % of the best is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load [default %(default)s]")
    parser.add_argument("--limit", type=float, default=10.0, help="longest TTFT, s [default %(default)s]")
    parser.add_argument("--burst", type=float, default=10.0, help="times the best rate [default %(default)s]")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens of an answer [default %(default)s]")
    options = parser.parse_args()
    with suite() as url:
        load = Load(url, options.output_tokens)
        asyncio.run(load.in_turn(16, 3.0))
        best = asyncio.run(load.in_turn(2 * 16, options.seconds))
        rate = best.goodput(options.limit)
        burst = asyncio.run(load.arriving(options.burst * rate, options.seconds))
    ratio = burst.goodput(options.limit) / rate
    for name, seen in (("best", best), (f"{options.burst:g} x", burst)):
        ttft = sorted(seen.ttft_s) or [math.nan]
        print(
            f"{name:>6}: {seen.goodput(options.limit):7.1f} answers/s within {options.limit:g} s, TTFT p50 "
            f"{ttft[len(ttft) // 2]:.2f} s, p99 {ttft[int(len(ttft) * 0.99)]:.2f} s, {dict(seen.statuses)}"
        )
    print(f"goodput under the burst: {ratio:.0%} of the best (at least {TARGET:.0%} is wanted)")
    sys.exit(ratio < TARGET)


class Load:
    """Asks a frontend."""

    def __init__(self, url: str, output_tokens: int) -> None:
        self._host = urlsplit(url)
        self._output_tokens = output_tokens
        self._numbers = iter(range(1_000_000_000))

    async def in_turn(self, streams: int, seconds: float) -> Seen:
        """So many at any time."""
        seen, end = Seen(), time.perf_counter() + seconds

        async def ask_on() -> None:
            while time.perf_counter() < end:
                await self._ask(seen)

        began = time.perf_counter()
        await asyncio.gather(*(ask_on() for _ in range(streams)))
        seen.elapsed_s = time.perf_counter() - began
        return seen

    async def arriving(self, rate: float, seconds: float) -> Seen:
        """At a steady rate, whether or not the earlier ones are done. Answers that end after the burst count too."""
        seen, began = Seen(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(began + number / rate - time.perf_counter(), 0))
                tasks.create_task(self._ask(seen))
            arrived_s = time.perf_counter() - began
        # The backlog that is worked off after the last arrival would flatter the rate if its time did not count.
        seen.elapsed_s = max(time.perf_counter() - began, arrived_s)
        return seen

    async def _ask(self, seen: Seen) -> None:
        request = {
            "model": "sim", "prompt": f"{next(self._numbers)} The river and the garden.", "stream": True,
            "max_tokens": self._output_tokens, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        body = json.dumps(request).encode()
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self._host.hostname, self._host.port)
        except OSError as error:
            seen.statuses[type(error).__name__] += 1
            return
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            status = (await reader.readline()).split(b" ")[1].decode()
            first = 0.0
            while line := await reader.readline():
                if not first and b'"text":"' in line:
                    first = time.perf_counter() - began
                if line.startswith(b"data: [DONE]"):
                    seen.ttft_s.append(first)
            seen.statuses[status] += 1
        except (OSError, IndexError) as error:
            seen.statuses[type(error).__name__] += 1
        finally:
            writer.close()


@contextmanager
def suite() -> Iterator[str]:
    """A running deployment of its own, with two decode workers and the defaults; yields its URL."""
    deployment = f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "slow.toml"
        profile.write_text(PROFILE)
        shape = ["--prefill", "0", "--decode", "2", "--engine", "sim", "--time-scale", "1", "--port", "0"]
        shape += ["--sim-profile", str(profile), "--max-num-seqs", "16"]
        try:
            yield _tokenmill("up", "--detach", "--deployment", deployment, *shape).strip()
        finally:
            _tokenmill("down", "--deployment", deployment)


def _tokenmill(*arguments: str) -> str:
    """Runs the command quietly; what it says on standard error is shown when it fails."""
    command = [TOKENMILL, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if ran.returncode != 0:
        sys.exit(f"{ran.stderr}`tokenmill {' '.join(arguments)}` failed")
    return ran.stdout


if __name__ == "__main__":
    main()
