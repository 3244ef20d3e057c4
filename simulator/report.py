"""What replays found, for programs (JSON) and for people (one HTML page that needs nothing else). Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from simulator.measures import Result
from simulator.replay import Limits

__all__ = ["as_html", "as_json"]


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything but `speedup` follows from trace, cluster, settings and seed alone."""
    wall_s = sum(result.wall_s for result in results)
    return {
        "policies": {
            result.policy: {
                "ttft_ms": asdict(result.ttft),
                "itl_ms": asdict(result.itl),
                "e2e_ms": asdict(result.e2e),
                "hit_rate": result.hit_rate,
                "load_max_over_mean": result.load_max_over_mean,
                "goodput": result.goodput,
                "good_share": result.good_share,
                "requests": result.requests,
                "refused": result.refused,
                "remote_prefills": result.remote_prefills,
                "virtual_s": result.virtual_s,
                "computed_tokens": result.computed_tokens,
            }
            for result in results
        },
        "speedup": sum(result.virtual_s for result in results) / wall_s if wall_s else 0.0,
    }


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#1c2733;background:#fff}
table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .8em;text-align:right;border-bottom:1px solid #dde3ea}
th:first-child,td:first-child{text-align:left}h1{font-size:1.4em}h2{font-size:1.1em;margin:1.6em 0 .2em}
.charts{display:flex;flex-wrap:wrap;gap:1em 2em}svg text{font:12px system-ui,sans-serif;fill:#1c2733}
"""
_COLOURS = ("#2f6fb2", "#d9822b", "#3a9a6b", "#a4508b", "#7d8a97", "#c0392b")
_WIDTH, _ROW, _NAME, _VALUE = 440, 20, 110, 80

_TABLE: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("policy", lambda result: escape(result.policy)),
    ("TTFT mean, ms", lambda result: f"{result.ttft.mean:,.0f}"),
    ("p50", lambda result: f"{result.ttft.p50:,.0f}"),
    ("p99", lambda result: f"{result.ttft.p99:,.0f}"),
    ("ITL mean, ms", lambda result: f"{result.itl.mean:,.1f}"),
    ("p99", lambda result: f"{result.itl.p99:,.1f}"),
    ("E2E mean, ms", lambda result: f"{result.e2e.mean:,.0f}"),
    ("p99", lambda result: f"{result.e2e.p99:,.0f}"),
    ("goodput, 1/s", lambda result: f"{result.goodput:.2f}"),
    ("refused", lambda result: f"{result.refused:,}"),
    ("hit rate", lambda result: f"{result.hit_rate:.1%}"),
    ("max/mean load", lambda result: f"{result.load_max_over_mean:.2f}"),
)


def as_html(title: str, results: Sequence[Result], limits: Limits) -> str:
    """One page: a table, and a chart for each question."""
    charts: list[tuple[str, Callable[[Result], float], str]] = [
        (f"{name} {percentile}, ms", lambda r, of=of, at=at: getattr(getattr(r, of), at), ",.1f")  # type: ignore[misc]
        for of, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E"))
        for at, percentile in (("mean", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
    ]
    charts += [
        (
            f"Goodput, requests/s: TTFT ≤ {limits.ttft_ms:g} ms and mean ITL ≤ {limits.itl_ms:g} ms",
            lambda r: r.goodput, ".2f",
        ),
        ("Hit rate: prompt tokens not computed, %", lambda r: 100 * r.hit_rate, ".1f"),
        ("Balance: prompt tokens computed, busiest worker / mean", lambda r: r.load_max_over_mean, ".2f"),
    ]  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name, _ in _TABLE)
    rows = "".join("<tr>" + "".join(f"<td>{cell(r)}</td>" for _, cell in _TABLE) + "</tr>" for r in results)
    drawn = "".join(_chart(name, [(r.policy, value(r)) for r in results], form) for name, value, form in charts)
    balance = "".join(
        _chart(f"{r.policy}: prompt tokens computed by worker", list(r.computed_tokens.items()), ",.0f")
        for r in results
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{results[0].requests:,} requests</p>"
        f"<table><tr>{head}</tr>{rows}</table>"
        f'<h2>Policies</h2><div class="charts">{drawn}</div>'
        f'<h2>Workers</h2><div class="charts">{balance}</div></html>\n'
    )


def _chart(name: str, bars: Sequence[tuple[str, float]], form: str) -> str:
    """Horizontal bars with their values."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    room = _WIDTH - _NAME - _VALUE
    drawn = []
    for number, (label, value) in enumerate(bars):
        top = number * _ROW
        length = max(1.0, room * value / most)
        drawn.append(
            f'<text x="0" y="{top + 14}">{escape(label)}</text>'
            f'<rect x="{_NAME}" y="{top + 3}" width="{length:.1f}" height="{_ROW - 6}" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            f'<text x="{_NAME + length + 6:.1f}" y="{top + 14}">{format(value, form)}</text>'
        )
    return (
        f'<figure style="margin:0"><figcaption>{escape(name)}</figcaption>'
        f'<svg width="{_WIDTH}" height="{len(bars) * _ROW}" role="img" aria-label="{escape(name)}">'
        f"{''.join(drawn)}</svg></figure>"
    )
