from pathlib import Path

from controlplane.child_log import log_tail, rotate

PANIC = """\
{"level":"panic","msg":"failed to create WAL","error":"no space left on device"}
panic: failed to create WAL

goroutine 1 [running]:
go.etcd.io/etcd/server/v3/etcdserver.startNode(0x1204ae4, 0x7)
\t/tmp/etcd/server/etcdserver/raft.go:433 +0x2c7
main.main()
\t/tmp/etcd/server/main.go:32 +0x45
"""


def test_a_log_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    rotate(log, 10)
    log.write_text("ten bytes.")
    rotate(log, 10)
    assert [file.name for file in tmp_path.iterdir()] == ["decode.log"]


def test_a_log_past_its_bound_is_kept_once_and_written_on_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"the first one\n", b"the second one\n", b"the third one\n"):
            writer.write(text)
            rotate(log, 10)
        writer.write(b"more\n")
    assert (tmp_path / "decode.log.1").read_text() == "the third one\n"
    assert log.read_text() == "more\n"


def test_where_a_copy_cannot_be_made_the_log_is_only_emptied(tmp_path: Path) -> None:
    log = tmp_path / ("n" * 253)  # with .1 its name would be too long
    log.write_text("much too much")
    rotate(log, 10)
    assert log.read_text() == ""


def test_a_go_programs_trace_does_not_hide_why_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "etcd.log"
    log.write_text("started\n" + PANIC)
    assert log_tail(log, 2) == PANIC.splitlines()[:2]


def test_a_log_that_is_short_or_missing_is_all_there_is(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert log_tail(log, 5) == []
    log.write_text("one\n\n  two\n")
    assert log_tail(log, 5) == ["one", "  two"]
