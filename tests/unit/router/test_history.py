from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.errors import SettingsError
from services.router import decisions_log, history
from services.router.decision import Decision
from services.router.decisions_log import DecisionsLog
from services.router.history import DecisionRecord, History, record
from tests.unit.router.test_scheduler import PROMPT, TOKENS, Router, instance


def decisions(count: int, workers: int = 2) -> list[Decision]:
    router = Router(instance("d0", labels={"a": "b"}), *(instance(f"d{at}") for at in range(1, workers)))
    router.hold("d0", PROMPT[:4])
    return [router.schedule() for _ in range(count)]


def test_the_latest_decisions_are_kept_and_told_of_when_they_end_or_are_dropped() -> None:
    told: list[str] = []
    kept = History(3, lambda one: told.append(one.request.request_id))
    for decision in decisions(4):
        kept.add(decision)
    assert (len(kept), told) == (3, ["r1"])
    assert kept.find("r1") is None
    assert kept.find("r3") is not None
    kept.ended("r3")
    kept.ended("r3")
    kept.ended("r1")
    assert told == ["r1", "r3"]
    assert kept.find("r3") is not None
    kept.close()
    assert told == ["r1", "r3", "r2", "r4"]


def test_a_request_placed_again_is_told_of_twice_and_found_as_it_was_placed_last() -> None:
    told: list[Decision] = []
    kept = History(3, told.append)
    first, second = decisions(2)
    kept.add(first)
    kept.add(first)
    kept.add(second)
    assert told == [first]
    assert len(kept) == 2


def test_with_many_workers_fewer_decisions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_ROWS", 20)
    kept = History(100)
    for decision in decisions(9, workers=8):
        kept.add(decision)
    assert len(kept) == 2


def test_a_record_has_all_that_a_decision_was_made_from_and_survives_json() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"), instance("d2"))
    router.hold("p2", PROMPT[:20])
    router.load("d1", requests=4, blocks=100)
    decision = router.schedule(excluded=["p1"], max_tokens=7)
    router.scheduler.first_token("r1", router.now + 1, 0.5)
    written = msgspec.json.decode(msgspec.json.encode(record(decision, "lmetric")), type=DecisionRecord)
    assert written == record(decision, "lmetric")
    assert (written.decode, written.prefill, written.prompt_tokens, written.ttft_s) == ("d2", "p2", TOKENS, 0.5)
    assert (written.filtered, written.block_hashes, written.max_tokens) == ({"p1": "excluded"}, PROMPT, 7)
    decode, prefill = written.compared
    assert (decode.job, decode.workers, decode.requests, decode.kv_blocks) == ("decode", ["d1", "d2"], [4, 0], [100, 0])
    assert (prefill.job, prefill.held, prefill.workers[prefill.chosen]) == ("prefill", [20], "p2")
    assert decode.scores.index(min(decode.scores)) == decode.chosen


def test_a_log_has_a_line_for_each_decision_and_begins_anew_at_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = decisions(6), tmp_path / "log"
    monkeypatch.setattr(decisions_log, "MOST_BYTES", 2 * len(msgspec.json.encode(record(made[0], "lmetric"))) + 500)
    log = DecisionsLog(path, "lmetric", CollectorRegistry())
    for decision in made:
        log.add(decision)
    log.close()
    lines = [*(tmp_path / "log.1").read_bytes().splitlines(), *path.read_bytes().splitlines()]
    names = [msgspec.json.decode(line, type=DecisionRecord).request_id for line in lines]
    assert names == [decision.request.request_id for decision in made][-len(names) :]
    assert 2 <= len(names) < 6


def test_a_log_that_cannot_be_opened_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decisions_log"):
        DecisionsLog(tmp_path / "nowhere" / "log", "lmetric", CollectorRegistry())
