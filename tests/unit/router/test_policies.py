from __future__ import annotations

from controlplane.instances import State
from kvcache.format import KvFormat
from services.router import policies
from services.router.placements import Load
from services.router.policies import POLICIES, Job, Lmetric, RoundRobin
from services.router.workers import Worker

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")


def worker(name: str = "w") -> Worker:
    return Worker(name, 1, "host:1", "decode", State.READY, FORMAT)


def test_lmetric_multiplies_prompt_work_by_requests() -> None:
    load = Load(requests=3, queued_tokens=200, kv_blocks=99)
    for job in (Job.PREFILL, Job.WHOLE):
        assert Lmetric().score(job, worker(), load, 100, 7) == ((200 + 100) * (3 + 1), 0)


def test_lmetric_counts_at_least_one_block_so_that_a_full_hit_still_sees_the_load() -> None:
    busy, idle = Load(requests=5), Load()
    assert Lmetric().score(Job.PREFILL, worker(), idle, 0, 1) == (16, 0)
    assert Lmetric().score(Job.PREFILL, worker(), busy, 0, 1) > Lmetric().score(Job.PREFILL, worker(), idle, 90, 1)


def test_lmetric_decode_multiplies_requests_by_blocks_and_prefers_fewer_to_move() -> None:
    assert Lmetric().score(Job.DECODE, worker(), Load(2, 500, 30), 100, 7) == ((2 + 1) * (30 + 7), 7)
    far, near = Load(kv_blocks=0), Load(kv_blocks=5)
    assert Lmetric().score(Job.DECODE, worker(), near, 0, 5) < Lmetric().score(Job.DECODE, worker(), far, 0, 10)


def test_round_robin_takes_the_one_whose_turn_is_longest_ago() -> None:
    policy, workers = RoundRobin(), [worker(name) for name in "abc"]

    def turn() -> str:
        best = min(workers, key=lambda one: policy.score(Job.WHOLE, one, Load(9, 9, 9), 0, 0))
        policy.chosen(best)
        return best.instance_id

    assert [turn() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    workers.append(worker("new"))
    assert [turn() for _ in range(4)] == ["new", "a", "b", "c"]


def test_round_robin_remembers_a_bounded_number_of_workers() -> None:
    policy = RoundRobin()
    for number in range(policies._MOST_REMEMBERED + 5):
        policy.chosen(worker(str(number)))
    assert policy.score(Job.WHOLE, worker("0"), Load(), 0, 0) == (0, 0)
    assert policy.score(Job.WHOLE, worker("5"), Load(), 0, 0) == (6, 0)


def test_every_policy_says_what_it_does() -> None:
    for make in POLICIES.values():
        text = type(make()).__doc__ or ""
        assert all(word in text for word in ("Inputs:", "Parameters:", "Limits:")), make
