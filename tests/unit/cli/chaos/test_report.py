import json

from cli.chaos.checker import Judgement, Verdict
from cli.chaos.report import Gap, Happened, Report, rows

RIGHT = Judgement(Verdict.RIGHT)


def _report(**changes: object) -> Report:
    given: dict[str, object] = {
        "seed": 1, "seconds": 60.0, "judgements": [RIGHT, RIGHT], "attempts": 2, "leaks": [], "unrecovered": [],
        "rows": [], "handoffs": {}, "load_average": 0.5,
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


def test_the_table_is_the_same_for_people_and_in_markdown() -> None:
    report = _report(rows=rows([Happened("kill-nats", 1, 1, 1.5, 0)], []))
    heads, lines = report.table()
    assert lines == [["kill-nats", "1", "0", "0.50 s", "0.50 s", "-", "-"]]
    assert report.markdown().splitlines() == [
        "| " + " | ".join(heads) + " |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| kill-nats | 1 | 0 | 0.50 s | 0.50 s | - | - |",
    ]
