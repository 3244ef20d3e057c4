"""Workers of a real model die while they answer: greedy answers stay what they were before, and no KV stays held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.report_of import report_of
from tests.e2e.command_line import Tokenmill

pytestmark = pytest.mark.vllm


def test_killed_workers_of_a_real_model_change_no_answer(tokenmill: Tokenmill, tmp_path: Path) -> None:
    report = report_of(tokenmill, tmp_path, "--scenario", "real-model", "--minutes", "1", "--strikes", "3")
    assert report["right"] > 0
    assert set(report["faults"]) <= {"kill-prefill", "kill-decode", "hang-up-clients"}
