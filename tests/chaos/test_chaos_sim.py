"""Parts of a simulated deployment fail at random, from a seed, under load: nothing is wrong, lost, hung or leaked.

How long each recovery took is printed (`pytest -s`), not asserted. `tokenmill chaos --minutes 30 --seed 1` goes on
where these stop.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.report_of import report_of
from tests.e2e.command_line import Tokenmill


def test_nothing_is_wrong_lost_hung_or_leaked_while_every_part_fails(tokenmill: Tokenmill, tmp_path: Path) -> None:
    report = report_of(tokenmill, tmp_path, "--minutes", "2", "--seed", "2026")
    assert report["right"] > 100
    assert sum(fault["count"] for fault in report["faults"].values()) >= 4


@pytest.mark.parametrize(("scenario", "outcome"), [("corrupt-kv", "corrupt"), ("late-kv", "late")])
def test_bad_kv_is_caught_and_changes_no_answer(
    tokenmill: Tokenmill, tmp_path: Path, scenario: str, outcome: str
) -> None:
    lease = ("--kv-lease-s", "2") if outcome == "late" else ()
    report = report_of(tokenmill, tmp_path, "--minutes", "0.3", "--scenario", scenario, *lease)
    assert report["handoffs"].get(outcome, 0) > 0, report["handoffs"]
