from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.instances import State
from kvcache.format import KvFormat
from kvcache.load import LoadReport
from services.router import placements
from services.router.placements import Book, Load, LoadColumns, Share
from services.router.timing import Timings
from services.router.workers import Group, Worker

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")


def share(worker: str, *, tokens: int = 0, blocks: int = 0, at: float | None = 0.0) -> Share:
    return Share(worker, tokens, blocks, at)


def report(worker: str, *, requests: int = 0, tokens: int = 0, blocks: int = 0) -> LoadReport:
    return LoadReport(
        worker, 1, 0, 0, 0, running_requests=requests, queued_prefill_tokens=tokens, kv_used_blocks=blocks
    )


def test_a_placement_counts_from_its_decision_until_it_is_freed() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d", blocks=5), share("p", tokens=80, blocks=5), now=0)
    assert (book.load("d"), book.load("p")) == (Load(1, 0, 5), Load(1, 80, 5))
    book.prefilled("r", now=1)
    assert (book.load("d"), book.load("p")) == (Load(1, 0, 5), Load(0, 0, 0))
    book.freed("r")
    assert (book.load("d"), len(book)) == (Load(0, 0, 0), 0)


def test_what_a_frontend_asked_for_is_known_until_it_is_freed() -> None:
    book = Book(ttl_s=60)
    for request_id, frontend_id in (("a", "f1"), ("b", "f2"), ("c", "f1"), ("d", "")):
        book.place(request_id, share("d"), None, now=0, frontend_id=frontend_id)
    assert book.asked_by({"f1", "f3"}) == ["a", "c"]
    book.freed("a")
    assert book.asked_by({"f1"}) == ["c"]


def test_the_first_token_ends_the_computing_of_a_prompt() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d", tokens=80, blocks=5), None, now=0)
    book.computed("r")
    assert book.load("d") == Load(1, 0, 5)
    book.freed("r")
    assert book.load("d") == Load(0, 0, 0)


def test_a_report_replaces_what_was_believed_but_for_requests_it_cannot_have_seen() -> None:
    book = Book(ttl_s=60)
    book.place("seen", share("d", tokens=10, blocks=1, at=0), None, now=0)
    book.place("on its way", share("d", tokens=20, blocks=2, at=4.95), None, now=4.95)
    book.place("in prefill", share("d", blocks=4, at=None), share("p", tokens=40, at=0), now=0)
    book.report(report("d", requests=7, tokens=100, blocks=50), now=5)
    assert book.load("d") == Load(7 + 2, 100 + 20, 50 + 2 + 4)
    book.prefilled("in prefill", now=5.5)
    book.report(report("d", requests=9, tokens=100, blocks=60), now=7)
    assert book.load("d") == Load(9, 100, 60)


def test_a_report_that_was_overtaken_by_a_newer_one_changes_nothing() -> None:
    book = Book(ttl_s=60)
    newer, older = replace(report("d", requests=3), steps=50), replace(report("d", requests=9), steps=40)
    book.report(newer, now=5)
    book.report(older, now=5.1)
    assert book.load("d").requests == 3
    book.report(replace(newer, running_requests=4), now=6)  # it stood still
    assert book.load("d").requests == 4
    book.report(replace(older, epoch=2, steps=0), now=7)  # it has begun anew
    assert book.load("d").requests == 9


def test_a_lost_outcome_is_corrected_by_the_next_report() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d", tokens=10, blocks=1, at=0), None, now=0)
    book.report(report("d"), now=1)
    assert book.load("d") == Load(0, 0, 0)
    book.freed("r")  # comes late after all
    assert book.load("d") == Load(0, 0, 0)


def test_a_request_placed_again_leaves_its_first_workers() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d1", blocks=1), share("p1", tokens=9), now=0)
    book.place("r", share("d2", blocks=1), None, now=1)
    assert (book.load("d1").requests, book.load("p1").requests, book.load("d2").requests) == (0, 0, 1)


def test_placements_expire_by_the_workers_reports_too_when_nothing_new_comes() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d", blocks=5), None, now=0)
    book.report(report("other"), now=59)
    assert len(book) == 1
    book.report(report("other"), now=61)
    assert (len(book), book.load("d")) == (0, Load(0, 0, 0))


def test_placements_nobody_reports_on_expire_and_are_bounded() -> None:
    book = Book(ttl_s=60)
    book.place("old", share("d"), None, now=0)
    book.place("new", share("d"), None, now=61)
    assert (len(book), book.load("d").requests) == (1, 1)
    for number in range(placements.MOST_PLACEMENTS + 10):
        book.place(str(number), share("d"), None, now=61)
    assert len(book) == placements.MOST_PLACEMENTS == book.load("d").requests


def test_a_forgotten_worker_is_idle_and_late_outcomes_for_it_are_harmless() -> None:
    book = Book(ttl_s=60)
    book.place("r", share("d", tokens=5), share("p", tokens=5), now=0)
    book.forget("p")
    book.prefilled("r", now=1)
    book.forget("d")
    book.computed("r")
    book.freed("r")
    book.freed("never placed")
    assert (book.load("d"), book.load("p"), len(book)) == (Load(), Load(), 0)


@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_loads_are_never_negative_and_end_at_zero_when_all_is_freed(chance: random.Random, steps: int) -> None:
    book, placed = Book(ttl_s=50), set[str]()
    for now in range(steps):
        match chance.randrange(6):
            case 0 | 1:
                name = f"r{chance.randrange(10)}"
                decode = share(chance.choice("ab"), tokens=chance.randrange(9), blocks=chance.randrange(9), at=None)
                prefill = share(chance.choice("pq"), tokens=chance.randrange(9), at=now) if now % 2 else None
                book.place(name, decode, prefill, now)
                placed.add(name)
            case 2:
                book.prefilled(f"r{chance.randrange(10)}", now)
            case 3:
                book.computed(f"r{chance.randrange(10)}")
            case 4:
                book.freed(f"r{chance.randrange(10)}")
            case 5:
                book.report(
                    report(chance.choice("abpq"), requests=chance.randrange(3), tokens=chance.randrange(9)), now
                )
        for worker in "abpq":
            load = book.load(worker)
            assert min(load.requests, load.queued_tokens, load.kv_blocks) >= 0
    for name in placed:
        book.freed(name)
    for worker in "abpq":
        book.report(report(worker), now=steps + 1)
        assert book.load(worker) == Load()
    assert len(book) == 0


@pytest.mark.parametrize("most", [3, 10_000])
def test_columns_that_follow_the_book_say_what_every_load_is(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(placements, "MOST_CHANGES", most)
    chance, book, timings = random.Random(3), Book(ttl_s=20), Timings()
    groups = [Group([Worker(name, 1, "", "decode", State.READY, FORMAT) for name in names]) for names in ("abc", "cd")]
    for now in range(500):
        name = f"r{chance.randrange(20)}"
        prefill = share(chance.choice("bd"), tokens=chance.randrange(9), at=now) if now % 2 else None
        match chance.randrange(6):
            case 0 | 1:
                book.place(name, share(chance.choice("abcd"), tokens=chance.randrange(9), at=None), prefill, now)
            case 2:
                book.prefilled(name, now)
            case 3:
                book.computed(name)
            case 4:
                book.report(report(chance.choice("abcd"), requests=chance.randrange(3)), now)
            case 5 if now % 5 == 0:
                book.forget(chance.choice("abcd"))
        if chance.random() < 0.3:
            group = chance.choice(groups)
            columns, _ = group.refresh(book, timings)
            assert columns == LoadColumns.of([book.load(name) for name in group.ids])
            columns.requests[0] = -1  # the caller's own
