from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cli.simulate import main
from controlplane.errors import SettingsError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    chance = random.Random(1)
    rows = [
        {
            "timestamp": 200 * number,
            "input_length": 2000,
            "output_length": 50,
            "hash_ids": [0, *(100 * chance.randint(1, 5) + part for part in range(3))],
        }
        for number in range(60)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_prints_a_table_and_writes_figures_and_a_page(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    argv = [str(trace), "--policy", "lmetric,round_robin", "--workers", "3", "--json", str(figures)]
    assert main([*argv, "--report", str(page), "--speed", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "lmetric", "round_robin"]
    written = json.loads(figures.read_text())
    assert list(written["policies"]) == ["lmetric", "round_robin"]
    assert written["speedup"] > 0
    assert page.read_text().startswith("<!doctype html>")


def test_prefill_and_decode_workers_apart(trace: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main([str(trace), "--policy", "lmetric", "--prefill", "1", "--decode", "2", "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())["policies"]["lmetric"]["remote_prefills"] == 60


def test_the_routers_own_settings_may_be_given(trace: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    argv = [str(trace), "--policy", "lmetric", "--prefill", "1", "--decode", "2", "--json", str(figures)]
    assert main([*argv, "--remote-prefill-min-tokens", "100000"]) == 0
    assert json.loads(figures.read_text())["policies"]["lmetric"]["remote_prefills"] == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policy", "luck"], "it must name some of"),
        (["--speed", "0"], "--speed"),
        (["--prefill", "1"], "go together"),
        (["--workers", "2", "--decode", "1"], "--workers is for"),
        (["--workers", "0"], "must decode"),
        (["--profile", "abacus"], "profile is 'abacus'"),
        (["--block-size", "100"], "does not divide"),
        (["--block-size", "0"], "does not divide"),
        (["--polcy", "lmetric"], "--policy"),
    ],
)
def test_what_cannot_be_simulated_is_refused(trace: Path, flags: list[str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        main([str(trace), *flags])
