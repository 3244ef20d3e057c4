"""What a replay measures, gathered as it runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.sim.scheduler import Coast

__all__ = ["Distribution", "Gaps", "Result", "Timing", "percentile"]

_GAP_PS = 10_000_000
"""Gaps between tokens are told apart to 10 microseconds: there are millions of them."""


@dataclass(slots=True)
class Timing:
    """One request's way, in seconds of virtual time."""

    arrived: float
    output_tokens: int
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Mean time from one of its tokens to the next; 0 for an answer of one."""
        return (self.ended - self.first_token) / max(1, self.output_tokens - 1)


@dataclass(slots=True)
class Distribution:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        """Of all values; zeros when there are none."""
        ordered = sorted(seconds)
        return cls(
            1000 * sum(ordered) / max(1, len(ordered)),
            *(1000 * percentile(ordered, percent) for percent in (50, 90, 99)),
        )


class Gaps:
    """Times between consecutive tokens of one answer, over all answers."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total_ps = 0
        self._number = 0

    def add(self, tokens: int, gap_ps: int) -> None:
        """So many, all as long."""
        self._counts[gap_ps // _GAP_PS] += tokens
        self._total_ps += tokens * gap_ps
        self._number += tokens

    def add_coast(self, coast: Coast, steps: int) -> None:
        """Each of these steps gave each of its batch a token."""
        first, growth, batch = coast.first_ps, coast.growth_ps, coast.batch
        done = 0
        while done < steps:
            gap = first + done * growth
            until = steps if growth <= 0 else min(steps, done + -(-(_GAP_PS - gap % _GAP_PS) // growth))
            self._counts[gap // _GAP_PS] += (until - done) * batch
            done = until
        self._total_ps += coast.duration_ps(steps) * batch
        self._number += steps * batch

    def distribution(self) -> Distribution:
        """Each percentile as the middle of its 10 microseconds."""
        wanted = [50.0, 90.0, 99.0]
        found = [0.0, 0.0, 0.0]
        seen, at = 0, 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            while at < len(wanted) and seen * 100 >= wanted[at] * self._number:
                found[at] = (bucket + 0.5) * _GAP_PS / 1e9
                at += 1
        return Distribution(self._total_ps / 1e9 / max(1, self._number), *found)


@dataclass(slots=True)
class Result:
    """One policy's replay."""

    policy: str
    ttft: Distribution
    itl: Distribution
    e2e: Distribution
    hit_rate: float
    """Prompt tokens found in a cache / prompt tokens."""
    load_max_over_mean: float
    """Prompt tokens computed by the worker with the most / by the mean worker; of those that compute prompts."""
    goodput: float
    """Requests a second that kept both limits."""
    good_share: float
    requests: int
    refused: int
    """Of them, because too many waited at the router; they are in no other figure but `good_share`."""
    virtual_s: float
    """From the first arrival to the last token."""
    computed_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens computed, by worker."""
    remote_prefills: int = 0
    wall_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Virtual seconds in a real one."""
        return self.virtual_s / self.wall_s if self.wall_s else 0.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 when there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]
