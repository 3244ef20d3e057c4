from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from controlplane.errors import InvalidRequest, NotFound, Unavailable
from controlplane.instances import Instance, ModelCard, State
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.scheduler import Decision, Request, Scheduler
from services.router.workers import Roster

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")
PROMPT = list(range(1, 33))
TOKENS = 32 * 16 + 3


def instance(
    name: str, *, state: State = State.READY, kv_format: KvFormat = FORMAT, model: str = "model", epoch: int = 1
) -> Instance:
    role = "prefill" if name.startswith("p") else "decode"
    card = ModelCard(model, "builtin", kv_format, 8192, 1000, 1000, 16, 2048)
    return Instance(role, name, state, epoch, f"{name}:1", 1, "host", "0", role, model=card)


class Router:
    """All the state of a router and none of its wires."""

    def __init__(self, *instances: Instance, policy: str = "lmetric", min_tokens: int = 0) -> None:
        self.now = 1000.0
        self.index, self.roster, self.book = KvIndex(), Roster(), Book(60)
        self.scheduler = Scheduler(
            POLICIES[policy](Parameters()), min_tokens,
            roster=self.roster, index=self.index, book=self.book, predictions=Predictions(), chance=random.Random(1),
        )  # fmt: skip
        self.roster.update(instances)
        self.holders = {one.instance_id: self.index.open(one.instance_id) for one in instances}
        self.placed = 0

    def hold(self, name: str, hashes: Sequence[int]) -> None:
        self.index.store(self.holders[name], None, hashes)

    def load(self, name: str, *, requests: int = 0, tokens: int = 0, blocks: int = 0) -> None:
        report = LoadReport(name, 1, 0, 0, 0, requests, 0, tokens, blocks)
        self.book.report(report, self.now)

    def schedule(
        self,
        hashes: Sequence[int] = PROMPT,
        tokens: int = TOKENS,
        *,
        model: str = "model",
        excluded: Sequence[str] = (),
    ) -> Decision:
        self.placed += 1
        request = Request(f"r{self.placed}", model, hashes, tokens, excluded)
        return self.scheduler.schedule(request, self.now)

    def names(self, decision: Decision) -> tuple[str | None, str]:
        prefill = decision.prefill
        return prefill.worker.instance_id if prefill else None, decision.decode.worker.instance_id


def test_a_prompt_goes_to_the_prefill_worker_that_holds_it_and_the_decode_worker_with_room() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"), instance("d2"))
    router.hold("p2", PROMPT[:20])
    router.load("d1", requests=4, blocks=100)
    decision = router.schedule()
    assert router.names(decision) == ("p2", "d2")
    assert decision.computes.held_blocks == 20
    assert decision.computes.uncached_tokens == TOKENS - 20 * 16


def test_load_outweighs_a_cached_prefix_when_it_is_large_enough() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"))
    router.hold("p2", PROMPT[:20])
    router.load("p2", requests=3, tokens=4000)
    assert router.names(router.schedule()) == ("p1", "d1")


def test_without_prefill_workers_decode_serves_whole_where_the_prefix_is() -> None:
    router = Router(instance("d1"), instance("d2"))
    router.hold("d2", PROMPT)
    decision = router.schedule()
    assert router.names(decision) == (None, "d2")
    assert decision.computes.uncached_tokens == 3
    assert "no usable prefill worker" in decision.why


@pytest.mark.parametrize(
    ("min_tokens", "held", "remote"), [(0, 0, True), (0, 32, True), (100, 32, False), (100, 0, True), (515, 0, False)]
)
def test_remote_prefill_is_taken_above_the_configured_number_of_uncached_tokens(
    min_tokens: int, held: int, remote: bool
) -> None:
    router = Router(instance("p1"), instance("d1"), min_tokens=min_tokens)
    router.hold("d1", PROMPT[:held])
    decision = router.schedule()
    assert (decision.prefill is not None) is remote
    if not remote:
        assert f"remote_prefill_min_tokens = {min_tokens}" in decision.why


def test_only_ready_workers_are_chosen_and_quiet_ones_where_nobody_is_ready() -> None:
    states = {"d1": State.STARTING, "d2": State.READY, "d3": State.DRAINING, "d4": State.SUSPECT, "d5": State.FAILED}
    router = Router(*(instance(name, state=state) for name, state in states.items()))
    assert {router.names(router.schedule())[1] for _ in range(20)} == {"d2"}
    assert {router.names(router.schedule(excluded=["d2"]))[1] for _ in range(20)} == {"d4"}
    with pytest.raises(Unavailable, match="d3 is draining") as failed:
        router.schedule(excluded=["d2", "d4"])
    assert failed.value.retry_after_s > 0
    assert "d2 is excluded" in failed.value.message


def test_a_quiet_prefill_worker_is_not_waited_for() -> None:
    router = Router(instance("p1", state=State.SUSPECT), instance("d1"))
    assert router.names(router.schedule()) == (None, "d1")


def test_a_model_nobody_ever_served_is_not_found_and_one_without_workers_unavailable() -> None:
    router = Router(instance("d1"))
    with pytest.raises(NotFound, match="known: model") as failed:
        router.schedule(model="other")
    assert failed.value.param == "model"
    router.roster.update([])
    with pytest.raises(Unavailable, match="there is none"):
        router.schedule()


def test_requests_of_one_model_stay_with_its_workers() -> None:
    router = Router(instance("d1"), instance("d2", model="other"))
    assert {router.names(router.schedule())[1] for _ in range(10)} == {"d1"}


def test_wrong_requests_are_refused_with_the_field() -> None:
    router = Router(instance("d1"))
    with pytest.raises(InvalidRequest) as failed:
        router.schedule([], 0)
    assert failed.value.param == "prompt_tokens"
    with pytest.raises(InvalidRequest, match="33 block_hashes for 515 prompt_tokens in blocks of 16") as failed:
        router.schedule([*PROMPT, 99])
    assert failed.value.param == "block_hashes"


def test_workers_of_different_formats_are_never_paired() -> None:
    other = replace(FORMAT, block_size=32, layout="hnd")
    router = Router(instance("p1", kv_format=other), instance("d1"))
    assert router.names(router.schedule()) == (None, "d1")
    router = Router(instance("p1", kv_format=other), instance("p2"), instance("d1"), instance("d2", kv_format=other))
    router.hold("p1", PROMPT)
    pairs = {router.names(router.schedule()) for _ in range(40)}
    assert pairs == {("p2", "d1"), ("p1", "d2")}
    ((prefill, decode), (second, third)) = router.roster.incompatible_pairs()
    assert {(prefill.instance_id, decode.instance_id), (second.instance_id, third.instance_id)} == {
        ("p1", "d1"),
        ("p2", "d2"),
    }
    assert "block_size 32 != 16" in prefill.format.differences(decode.format)


def test_hashes_of_another_block_size_count_for_nothing() -> None:
    router = Router(instance("d1", kv_format=replace(FORMAT, block_size=32)), instance("d2"))
    router.hold("d1", PROMPT)
    assert [candidate.held_blocks for candidate in router.schedule().compared()] == [0, 0]


def test_a_decode_worker_without_a_fitting_prefill_worker_waits_while_others_have_one() -> None:
    other = replace(FORMAT, dtype="bfloat16")
    router = Router(instance("p1"), instance("d1"), instance("d2", kv_format=other))
    assert {router.names(router.schedule()) for _ in range(10)} == {("p1", "d1")}
    filtered = router.schedule().filtered()
    assert [(worker.instance_id, "equal KV formats" in reason) for worker, reason in filtered] == [("d2", True)]


def test_a_burst_of_one_new_prefix_stays_together_before_any_event_came() -> None:
    router = Router(*(instance(f"d{number}") for number in range(8)))
    first = router.names(router.schedule())[1]
    router.book.freed("r1")
    assert router.names(router.schedule())[1] == first


def test_own_placements_spread_a_burst_of_different_prompts() -> None:
    router = Router(*(instance(f"d{number}") for number in range(4)))
    chosen = Counter(router.names(router.schedule(range(at, at + 32)))[1] for at in range(1000, 9000, 1000))
    assert sorted(chosen.values()) == [2, 2, 2, 2]


def test_equals_are_drawn_at_random() -> None:
    chosen = Counter[str]()
    router = Router(*(instance(f"d{number}") for number in range(4)))
    for at in range(400):
        decision = router.schedule(range(1000 * at + 1, 1000 * at + 33))
        chosen[router.names(decision)[1]] += 1
        router.book.freed(f"r{router.placed}")
    assert all(60 < count < 140 for count in chosen.values())


def test_round_robin_takes_turns_in_both_roles() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"), instance("d2"), policy="round_robin")
    router.hold("p1", PROMPT)
    pairs = [router.names(router.schedule()) for _ in range(4)]
    assert Counter(prefill for prefill, _ in pairs) == {"p1": 2, "p2": 2}
    assert Counter(decode for _, decode in pairs) == {"d1": 2, "d2": 2}


def test_an_explanation_has_every_worker_with_all_terms_or_the_reason() -> None:
    router = Router(instance("p1"), instance("d1"), instance("d2", state=State.DRAINING))
    router.hold("p1", PROMPT[:4])
    router.load("p1", requests=2, tokens=50)
    decision = router.schedule()
    seen = {candidate.worker.instance_id: candidate for candidate in decision.compared()}
    assert seen.keys() == {"p1", "d1"}
    assert seen["p1"].score == (50 + TOKENS - 64) * 3 == decision.computes.score
    assert (seen["p1"].held_blocks, seen["p1"].load.requests, seen["d1"].load.requests) == (4, 2, 0)
    assert [(worker.instance_id, reason) for worker, reason in decision.filtered()] == [("d2", "draining")]
