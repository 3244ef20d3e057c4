import json

import pytest

from cli.chaos.checker import Judgement, Verdict
from cli.chaos.plan import EFFECTS, FAULTS, Fault
from cli.chaos.report import Gap, Happened, Report, calm_gap, rows

RIGHT = Judgement(Verdict.RIGHT)


def _report(**changes: object) -> Report:
    given: dict[str, object] = {
        "seed": 1, "seconds": 60.0, "judgements": [RIGHT, RIGHT], "attempts": 2, "leaks": [], "unrecovered": [],
        "rows": [], "handoffs": {}, "calm_gap_s": None, "load_average": 0.5,
    } | changes  # fmt: skip
    return Report(**given)  # type: ignore[arg-type]


def test_a_run_is_good_when_nothing_is_wrong_lost_hung_or_leaked_and_all_came_back() -> None:
    assert _report().good
    assert _report(judgements=[RIGHT, Judgement(Verdict.CANCELLED), Judgement(Verdict.REFUSED, "HTTP 503")]).good
    for verdict in (Verdict.WRONG, Verdict.LOST, Verdict.HUNG):
        assert not _report(judgements=[RIGHT, Judgement(verdict, "why")]).good
    assert not _report(leaks=["decode-1: 2 KV handles held"]).good
    assert not _report(unrecovered=["kill-decode of decode-1"]).good


def test_the_report_for_programs_has_its_promised_keys() -> None:
    bad = _report(judgements=[RIGHT, Judgement(Verdict.LOST, "HTTP 500")], leaks=["a", "b"])
    document = json.loads(json.dumps(bad.as_json()))
    assert {key: document[key] for key in ("requests", "wrong", "lost", "hung", "leaked")} == {
        "requests": 2, "wrong": 0, "lost": 1, "hung": 0, "leaked": 2,
    }  # fmt: skip
    assert document["faults"] == {}
    assert document["findings"] == ["lost: 1 x HTTP 500", "leaked: a", "leaked: b"]


def test_a_faults_row_has_the_median_and_worst_of_its_times() -> None:
    happened = [
        Happened("kill-decode", began=10, over=10, well=11, streams=3),
        Happened("kill-decode", began=20, over=20, well=22, streams=4),
        Happened("kill-decode", began=30, over=30, well=39, streams=5),
        Happened("freeze-etcd", began=50, over=55, well=None, streams=0),
    ]
    gaps = [Gap(0, 9.5), Gap(9.9, 10.4), Gap(10.5, 10.6), Gap(19, 20.2), Gap(38, 40), Gap(45, 49)]
    freeze, kill = rows(happened, gaps)
    assert (kill.count, kill.streams, kill.recovery_s) == (3, 12, (2, 9))
    assert kill.gap_s is not None
    assert [round(value, 3) for value in kill.gap_s] == [1.2, 2.0]
    assert (freeze.recovery_s, freeze.gap_s) == (None, None)


def test_what_no_fault_reached_is_what_gaps_are_held_against() -> None:
    happened = [Happened("kill-nats", began=10, over=10, well=12, streams=0)]
    gaps = [Gap(0, 1), Gap(4, 6), Gap(9, 14), Gap(11, 11.5), Gap(13, 16)]
    assert calm_gap(happened, gaps) == (2, 3)
    assert calm_gap(happened, [Gap(9, 14)]) is None


def test_the_table_says_what_each_fault_did() -> None:
    report = _report(rows=rows([Happened("kill-nats", 1, 1, 1.5, 0)], []), calm_gap_s=(0.1, 0.25))
    _, lines = report.table()
    assert lines == [
        ["kill-nats", "1", "0", "0.50 s", "0.50 s", "-", "-"],
        ["none", "", "", "", "", "0.10 s", "0.25 s"],
    ]
    assert report.markdown().splitlines()[2:] == [
        f"| `kill-nats` | {EFFECTS['kill-nats']} | -, - | 0.50 s, 0.50 s | 1 |",
        "| none |  | 0.10 s, 0.25 s |  |  |",
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_a_word_on_what_a_client_sees(fault: Fault) -> None:
    report = _report(rows=rows([Happened(fault.name, 1, 1, 1.5, 0)], []))
    assert f"| `{fault.name}` | " in report.markdown()
