from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from controlplane.errors import SettingsError
from controlplane.instances import Instance, ModelCard, State
from kvcache.events import Stored
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.history import DecisionRecord, record
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.scheduler import Request, Scheduler
from services.router.workers import Roster
from simulator.decisions import read_decisions, replay_decisions

BLOCK = 16


def instance(role: str, number: int) -> Instance:
    card = ModelCard("m", "builtin", KvFormat("m", "", BLOCK, "", "", "", ""), 10**6, 1, 10**6, 10**4, 8192)
    name = f"{role}-{number}"
    return Instance(role, name, State.READY, 1, name, 0, "", "", role, model=card)


def decided(policy: str, prefill: int, count: int = 60) -> list[DecisionRecord]:
    """What a router logs of decisions amid events, reports and requests that come and go."""
    chance = random.Random(policy)
    workers = [instance("prefill", n) for n in range(prefill)] + [instance("decode", n) for n in range(4)]
    roster, index, book = Roster(), KvIndex(), Book(120.0)
    roster.update(workers)
    holders = [index.open(one.instance_id) for one in workers]
    scheduler = Scheduler(
        POLICIES[policy](Parameters()), 0, roster=roster, index=index, book=book, predictions=Predictions(300.0),
        chance=chance,
    )  # fmt: skip
    chains = [[chance.getrandbits(64) for _ in range(40)] for _ in range(6)]
    records = []
    for number in range(count):
        hashes = chance.choice(chains)[: chance.randint(0, 40)]
        index.apply(chance.choice(holders), Stored(None, tuple(chance.choice(chains)[: chance.randint(1, 40)])))
        one = chance.choice(workers).instance_id
        report = LoadReport(one, 1, 0, 0, 0, chance.randint(0, 9), 0, chance.randint(0, 5000), chance.randint(0, 900))
        scheduler.report(report, number / 10)
        request = Request(f"r-{number}", "m", hashes, BLOCK * len(hashes) + chance.randint(1, BLOCK - 1))
        records.append(record(scheduler.schedule(request, number / 10), policy))
        if chance.random() < 0.5:
            scheduler.freed(f"r-{chance.randint(0, number)}")
    return records


@pytest.mark.parametrize("prefill", [0, 2], ids=["agg", "p/d"])
@pytest.mark.parametrize("policy", ["lmetric", "linear", "round_robin", "least_loaded"])
def test_decisions_made_again_from_the_log_come_out_the_same(policy: str, prefill: int, tmp_path: Path) -> None:
    records = decided(policy, prefill)
    log = tmp_path / "decisions.jsonl"
    log.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in reversed(records)))
    agreement = replay_decisions(read_decisions(log), Parameters())
    assert agreement.differing == []
    assert agreement.same == sum(len(one.compared) for one in records)


def test_a_decision_that_was_made_otherwise_is_found() -> None:
    records = decided("lmetric", 0)
    comparison = records[5].compared[0]
    wrong = comparison.scores.index(max(comparison.scores))
    others = msgspec.structs.replace(comparison, chosen=wrong)
    records[5] = msgspec.structs.replace(records[5], compared=[others])
    agreement = replay_decisions(records, Parameters())
    assert len(agreement.differing) == 1
    assert "is not the best" in agreement.differing[0]


def test_other_parameters_give_other_scores() -> None:
    assert replay_decisions(decided("linear", 0), Parameters(overlap_weight=2.0)).differing


def test_what_a_policy_had_learned_is_not_in_the_log() -> None:
    records = decided("ttft", 0)
    assert replay_decisions(records, Parameters()).skipped == sum(len(one.compared) for one in records)


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    log.write_text("{}\n")
    with pytest.raises(SettingsError, match=r"line 1: .*request_id"):
        read_decisions(log)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_decisions(tmp_path / "none")
