"""The wall clock may jump, so it decides nothing: durations, deadlines and leases are monotonic time's."""

from __future__ import annotations

import ast

from .source import ROOT, modules

WALL = {"time", "time_ns", "now", "utcnow", "today", "fromtimestamp"}
"""Of the modules `time` and `datetime`."""

ALLOWED = {
    "controlplane/discovery.py": "of two seeds made for one deployment the older is right",
    "controlplane/epochs.py": "an epoch begins at the present time, and is larger than the last in any case",
    "services/frontend/models.py": "shown to clients: since when a model is served",
    "services/frontend/openai_responses.py": "shown to clients: when an answer was made",
    "services/frontend/templates.py": "chat templates may ask for the date",
}


def test_the_wall_clock_is_read_in_these_places_only() -> None:
    readers = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in WALL
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime", "date")
            ):
                readers.add(str(module.path.relative_to(ROOT)))
    assert readers == ALLOWED.keys()
