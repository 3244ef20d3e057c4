"""What a run has shown, for programs and for people. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cli.chaos.checker import Judgement, Verdict
from cli.chaos.plan import EFFECTS

__all__ = ["FaultRow", "Gap", "Happened", "Report", "calm_gap", "rows"]

_SHOWN = 20
"""Of the findings of one kind."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One stream's longest silence."""

    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that happened."""

    name: str
    began: float
    over: float
    well: float | None
    streams: int


@dataclass(frozen=True, slots=True)
class FaultRow:
    """All faults of one name."""

    name: str
    count: int
    streams: int
    """Answers that were coming when it began, of all times together."""
    recovery_s: tuple[float, float] | None
    """Median and worst time from the end of the fault until the part was at work again."""
    gap_s: tuple[float, float] | None
    """Median and worst of the longest silence that any stream met, of each time. A fault's own length is in it."""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    seed: int
    seconds: float
    judgements: Sequence[Judgement]
    attempts: int
    """Frontends asked; more than requests where clients had to come again."""
    leaks: Sequence[str]
    unrecovered: Sequence[str]
    rows: Sequence[FaultRow]
    handoffs: Mapping[str, int]
    """Of KV between workers, by outcome, as far as the workers that lived to the end know."""
    calm_gap_s: tuple[float, float] | None
    """Median and worst of the longest silences of streams that met no fault: what a gap is to be held against."""
    load_average: float
    """Of the machine, over the last minute of the run: figures of a busy machine say little."""
    counts: Counter[Verdict] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(judgement.verdict for judgement in self.judgements))

    @property
    def good(self) -> bool:
        """Nothing was wrong, lost, hung or leaked, and everything came back."""
        return not (
            self.counts[Verdict.WRONG] or self.counts[Verdict.LOST] or self.counts[Verdict.HUNG] or self.leaks
            or self.unrecovered
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": len(self.judgements),
            "attempts": self.attempts,
            **{str(verdict): self.counts[verdict] for verdict in Verdict},
            "leaked": len(self.leaks),
            "unrecovered": list(self.unrecovered),
            "handoffs": dict(self.handoffs),
            "load_average": self.load_average,
            "calm_gap_s": self.calm_gap_s and [round(value, 3) for value in self.calm_gap_s],
            "findings": self.findings(),
            "faults": {row.name: _row_as_json(row) for row in self.rows},
        }

    def findings(self) -> list[str]:
        """What is not as it must be, some of each kind."""
        found = []
        for verdict in (Verdict.WRONG, Verdict.LOST, Verdict.HUNG):
            reasons = Counter(one.why for one in self.judgements if one.verdict is verdict)
            found += [f"{verdict}: {count} x {why}" for why, count in reasons.most_common(_SHOWN)]
        return found + [f"leaked: {leak}" for leak in self.leaks[:_SHOWN]] + list(self.unrecovered)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict)
        return f"{len(self.judgements)} requests in {self.seconds:.0f} s: {counts}, {len(self.leaks)} leaked"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows."""
        heads = ["fault", "times", "streams", "median recovery", "worst recovery", "median gap", "worst gap"]
        lines = [
            [row.name, str(row.count), str(row.streams), *_pair(row.recovery_s), *_pair(row.gap_s)] for row in self.rows
        ]
        return heads, [*lines, ["none", "", "", "", "", *_pair(self.calm_gap_s)]]

    def markdown(self) -> str:
        """The table of docs/reliability.md."""
        heads = ["fault", "what a client sees", "longest gap: median, worst", "recovery: median, worst", "times"]
        lines = [
            [f"`{row.name}`", _effect(row.name), ", ".join(_pair(row.gap_s)), ", ".join(_pair(row.recovery_s)),
             str(row.count)]
            for row in self.rows
        ]  # fmt: skip
        lines.append(["none", "", ", ".join(_pair(self.calm_gap_s)), "", ""])
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def rows(happened: Sequence[Happened], gaps: Sequence[Gap]) -> list[FaultRow]:
    """One for each fault's name, in alphabetical order."""
    by_name: dict[str, list[Happened]] = {}
    for one in happened:
        by_name.setdefault(one.name, []).append(one)
    return [_row(name, several, gaps) for name, several in sorted(by_name.items())]


def calm_gap(happened: Sequence[Happened], gaps: Sequence[Gap]) -> tuple[float, float] | None:
    """Median and worst of the silences that reach into no fault's time."""
    return _median_and_worst(
        [gap.until - gap.since for gap in gaps if not any(_meets(gap, fault) for fault in happened)]
    )


def _meets(gap: Gap, fault: Happened) -> bool:
    return gap.until >= fault.began and (fault.well is None or gap.since <= fault.well)


def _row(name: str, several: Sequence[Happened], gaps: Sequence[Gap]) -> FaultRow:
    recoveries = [one.well - one.over for one in several if one.well is not None]
    worst_gaps = [worst for one in several if (worst := _worst_gap(one, gaps)) is not None]
    return FaultRow(
        name, len(several), sum(one.streams for one in several), _median_and_worst(recoveries),
        _median_and_worst(worst_gaps),
    )  # fmt: skip


def _worst_gap(fault: Happened, gaps: Sequence[Gap]) -> float | None:
    return max((gap.until - gap.since for gap in gaps if _meets(gap, fault)), default=None)


def _median_and_worst(values: Sequence[float]) -> tuple[float, float] | None:
    return (median(values), max(values)) if values else None


def _effect(name: str) -> str:
    return EFFECTS.get(name) or EFFECTS[name.rpartition("-")[0]]


def _pair(values: tuple[float, float] | None) -> list[str]:
    return ["-", "-"] if values is None else [f"{value:.2f} s" for value in values]


def _row_as_json(row: FaultRow) -> Mapping[str, Any]:
    described: dict[str, Any] = {"count": row.count, "streams": row.streams}
    for name, pair in (("recovery", row.recovery_s), ("gap", row.gap_s)):
        for which, value in zip(("median", "worst"), pair or (None, None), strict=True):
            described[f"{which}_{name}_s"] = None if value is None else round(value, 3)
    return described
