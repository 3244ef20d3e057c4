from __future__ import annotations

import pytest

from controlplane.instances import State
from kvcache.format import KvFormat
from kvcache.index import Overlap, Overlaps
from services.router.candidates import Candidates, Job, gather
from services.router.placements import Book, Load, Share
from services.router.policies import POLICIES, LeastLoaded, Linear, Lmetric, Parameters, RoundRobin, simple
from services.router.timing import Timings
from services.router.workers import Group, Worker

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")
NO_PARAMETERS = Parameters()


def worker(name: str = "w") -> Worker:
    return Worker(name, 1, "host:1", "decode", State.READY, FORMAT)


def candidates(job: Job, *loads: Load, held: dict[int, int] | None = None, prompt: int = 100) -> Candidates:
    """Workers 0, 1... with these loads, each holding so many blocks of the prompt."""
    book = Book(60)
    for at, load in enumerate(loads):
        for number in range(load.requests):
            first = number == 0
            share = Share(str(at), load.queued_tokens if first else 0, load.kv_blocks if first else 0, 0)
            book.place(f"{at}-{number}", share, None, 0)
    group = Group([worker(str(at)) for at in range(len(loads))])
    overlaps = Overlaps([Overlap()], {})
    for at, blocks in (held or {}).items():
        overlaps.of[str(at)] = len(overlaps.distinct)
        overlaps.distinct.append(Overlap(blocks))
    return gather(job, group, overlaps, prompt // 16, prompt, book, Timings())


def test_lmetric_multiplies_prompt_work_by_requests() -> None:
    for job in (Job.PREFILL, Job.WHOLE):
        some = candidates(job, Load(3, 200, 99), Load(), held={1: 2})
        assert Lmetric(NO_PARAMETERS).score(some) == [(200 + 100) * (3 + 1), (100 - 32) * 1]


def test_lmetric_counts_at_least_one_block_so_that_a_full_hit_still_sees_the_load() -> None:
    some = candidates(Job.PREFILL, Load(), Load(5, 0, 0), held={0: 6, 1: 6}, prompt=96)
    assert Lmetric(NO_PARAMETERS).score(some) == [16, 16 * 6]


def test_lmetric_decode_multiplies_requests_by_blocks() -> None:
    some = candidates(Job.DECODE, Load(2, 500, 30), Load(), held={1: 6})
    assert Lmetric(NO_PARAMETERS).score(some) == [(2 + 1) * (30 + 7), 1 * (0 + 1)]


def test_linear_adds_weighted_prefill_blocks_to_resident_ones() -> None:
    some = candidates(Job.WHOLE, Load(1, 200, 30), Load(), held={1: 4})
    assert Linear(Parameters(overlap_weight=2.0)).score(some) == [2 * (200 + 100) / 16 + 30 + 7, 2 * 36 / 16 + 7]
    some = candidates(Job.DECODE, Load(1, 200, 30), Load(), held={1: 4})
    assert Linear(NO_PARAMETERS).score(some) == [30 + 7, 7]


def test_least_loaded_counts_requests() -> None:
    assert LeastLoaded(NO_PARAMETERS).score(candidates(Job.WHOLE, Load(2, 0, 99), Load(1, 900, 0))) == [2, 1]


def test_round_robin_takes_the_one_whose_turn_is_longest_ago() -> None:
    policy, names = RoundRobin(NO_PARAMETERS), list("abc")

    def turn() -> str:
        group = Group([worker(name) for name in names])
        scores = policy.score(gather(Job.WHOLE, group, Overlaps([Overlap()], {}), 0, 9, Book(60), Timings()))
        best = group.workers[scores.index(min(scores))]
        policy.chosen(Job.WHOLE, best, 0)
        return best.instance_id

    assert [turn() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    names.append("new")
    assert [turn() for _ in range(4)] == ["new", "a", "b", "c"]


def test_round_robin_remembers_a_bounded_number_of_workers() -> None:
    policy = RoundRobin(NO_PARAMETERS)
    for number in range(simple._MOST_REMEMBERED + 5):
        policy.chosen(Job.WHOLE, worker(str(number)), 0)
    assert len(policy._last) == simple._MOST_REMEMBERED


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_does(name: str) -> None:
    text = type(POLICIES[name](NO_PARAMETERS)).__doc__ or ""
    assert all(word in text for word in ("Inputs:", "Parameters:", "Limits:"))
