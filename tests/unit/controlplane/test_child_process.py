"""What is shown of a child's log."""

from __future__ import annotations

from pathlib import Path

from controlplane.child_process import log_tail

PANIC = """\
{"level":"panic","msg":"failed to create WAL","error":"no space left on device"}
panic: failed to create WAL

goroutine 1 [running]:
go.etcd.io/etcd/server/v3/etcdserver.startNode(0x1204ae4, 0x7)
\t/tmp/etcd/server/etcdserver/raft.go:433 +0x2c7
main.main()
\t/tmp/etcd/server/main.go:32 +0x45
"""


def test_a_go_programs_trace_does_not_hide_why_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "etcd.log"
    log.write_text("started\n" + PANIC)
    assert log_tail(log, 2) == PANIC.splitlines()[:2]


def test_a_log_that_is_short_or_missing_is_all_there_is(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert log_tail(log, 5) == []
    log.write_text("one\n\n  two\n")
    assert log_tail(log, 5) == ["one", "  two"]
