"""Runs `tokenmill chaos` as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.command_line import Tokenmill

_LONGEST_S = 1800.0
"""A run takes a few minutes; a busy machine makes starts and waits longer."""


_OF_LIBRARIES = ("torchinductor_*", "vllm_dist_*")
"""A cache of torch's, and what vLLM leaves when it is killed."""


def report_of(tokenmill: Tokenmill, folder: Path, *arguments: str) -> dict[str, Any]:
    """Of a run that must have gone well, and has left nothing behind."""
    file = folder / "report.json"
    logs = folder / "logs"
    done = tokenmill.run("chaos", "--json", str(file), "--logs", str(logs), *arguments, timeout_s=_LONGEST_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\nlogs: {logs}"
    tokenmill.assert_nothing_left(of_libraries=_OF_LIBRARIES)
    print(done.stdout)
    report: dict[str, Any] = json.loads(file.read_text())
    assert {key: report[key] for key in ("wrong", "lost", "hung", "leaked")} == dict.fromkeys(
        ("wrong", "lost", "hung", "leaked"), 0
    )
    assert report["requests"] == sum(report[verdict] for verdict in ("right", "cancelled", "refused"))
    return report
