"""Writes the pages of docs/ that list what the code declares: every setting, every metric."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from cli.sections import ALL_SECTIONS
from controlplane.setting_values import as_text

__all__ = ["pages"]

ROOT = Path(__file__).resolve().parent.parent

SETTINGS = """\
# Settings

Written by `make docs`. Defaults < a TOML file (`--config FILE` or `TOKENMILL_CONFIG`) < environment < flags; an unknown
key is refused with the nearest known name. `tokenmill config show` prints every value and where it came from. A field
`some_name` is the key `some_name` of its section in the file, and the flag `--some-name`, unless another flag is named
here. `tokenmill up` takes them all and passes each on to the services it concerns.

Beside these, `TOKENMILL_HOME` is the folder for fetched models (default `~/.cache/tokenmill`).
"""

METRICS = """\
# Metrics

Written by `make docs`. Every service serves Prometheus metrics at `/metrics` of its `metrics_port`, the frontend of its
HTTP port as well. A histogram is found as `_count`, `_sum` and `_bucket`. Metrics of the process itself (`process_*`,
`python_gc_*`) come with each.

| metric | type | labels | meaning | declared in |
|---|---|---|---|---|
"""

_CLASSES = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "Histogram": "histogram",
    "TokenHistogram": "histogram",
    "Info": "info",
}
_SUFFIX = {"counter": "_total", "info": "_info"}
"""What the Prometheus client appends to the declared name."""


def main() -> None:
    """Writes every page; with --check only says which are stale, and fails if any is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is stale")
    check = parser.parse_args().check
    for path, text in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.exit(f"stale, run `make docs`: {path.relative_to(ROOT)}")
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    metrics = METRICS + "".join(sorted(_metrics()))
    return {ROOT / "docs" / "settings.md": SETTINGS + "".join(_settings()), ROOT / "docs" / "metrics.md": metrics}


def _settings() -> Iterator[str]:
    for section, cls in ALL_SECTIONS.items():
        yield f"\n## [{section}]\n\n| field | environment | default | meaning |\n|---|---|---|---|\n"
        for one in fields(cls):
            rules = one.metadata["rules"]
            if rules.hidden:
                continue
            default = as_text(one.default if one.default_factory is MISSING else one.default_factory())
            prefix = "TOKENMILL_" if section == "common" else f"TOKENMILL_{section.upper()}_"
            flags = ", ".join(f"`{flag}`" for flag in (rules.short, rules.flag) if flag)
            name = f"`{one.name}`" + (f" ({flags})" if flags else "")
            choices = f" ({', '.join(rules.choices)})" if rules.choices else ""
            shown = f"`{default}`" if default else ""
            yield f"| {name} | `{prefix}{one.name.upper()}` | {shown} | {_cell(rules.help)}{choices} |\n"


def _metrics() -> Iterator[str]:
    for folder in ("controlplane", "engines", "services", "transfer"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if row := _metric(node):
                    yield f"{row} `{path.relative_to(ROOT)}` |\n"


def _metric(node: ast.AST) -> str:
    """A table row without its last cell; empty when the node declares no metric. A tuple does in a table of gauges."""
    if isinstance(node, ast.Call):
        kind, said = _CLASSES.get(getattr(node.func, "id", getattr(node.func, "attr", ""))), node.args
    elif isinstance(node, ast.Tuple):
        kind, said = "gauge", node.elts
    else:
        return ""
    constants = [one.value for one in said[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if kind is None or len(constants) != 2 or not constants[0].startswith("tokenmill_"):
        return ""
    name, meaning = constants
    labels = ast.literal_eval(said[2]) if len(said) > 2 and isinstance(said[2], ast.List) else []
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}{_SUFFIX.get(kind, '')}` | {kind} | {shown} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
