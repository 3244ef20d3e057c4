from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidRequest, NotFound, Unavailable
from controlplane.instances import Instance, ModelCard, State
from kvcache.events import Tier
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.candidates import Candidates
from services.router.history import History
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters
from services.router.predictions import Predictions
from services.router.scheduler import Decision, NoRoom, Request, Scheduler
from services.router.timing import Timings
from services.router.workers import Roster

FORMAT = KvFormat("fingerprint", "float32", 16, "nhd", "test", "1", "tp1-pp1")
PROMPT = list(range(1, 33))
TOKENS = 32 * 16 + 3
NO_PARAMETERS = Parameters()


def instance(
    name: str,
    *,
    state: State = State.READY,
    kv_format: KvFormat = FORMAT,
    model: str = "model",
    epoch: int = 1,
    labels: dict[str, str] | None = None,
    capabilities: tuple[str, ...] = (),
    loras: tuple[str, ...] = (),
) -> Instance:
    role = "prefill" if name.startswith("p") else "decode"
    card = ModelCard(model, "builtin", kv_format, 8192, 1000, 1000, 16, 2048, capabilities=capabilities, loras=loras)
    return Instance(role, name, state, epoch, f"{name}:1", 1, "host", "0", role, labels=labels or {}, model=card)


class Router:
    """All the state of a router and none of its wires."""

    def __init__(
        self,
        *instances: Instance,
        policy: str = "lmetric",
        min_tokens: int = 0,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        self.now = 1000.0
        self.index, self.roster, self.book, self.timings = KvIndex(), Roster(), Book(60), Timings()
        self.scheduler = Scheduler(
            POLICIES[policy](parameters), min_tokens, roster=self.roster, index=self.index, book=self.book,
            predictions=Predictions(), chance=random.Random(1), timings=self.timings, history=History(100),
        )  # fmt: skip
        self.roster.update(instances)
        self.holders = {one.instance_id: self.index.open(one.instance_id) for one in instances}
        self.placed = 0

    def hold(self, name: str, hashes: Sequence[int]) -> None:
        self.index.store(self.holders[name], None, hashes)

    def load(self, name: str, *, requests: int = 0, tokens: int = 0, blocks: int = 0, step_s: float = 0.0) -> None:
        """A report that knows of all that was placed."""
        self.now += 1
        report = LoadReport(name, 1, 0, 0, 0, requests, 0, tokens, blocks, step_time_us=round(step_s * 1e6))
        self.scheduler.report(report, self.now)

    def teach(self, name: str, *, per_token_s: float, transfer_s: float = 0.05) -> None:
        """Its speed has been measured."""
        timing = self.timings.of(name, "fingerprint")
        for tokens in (100, 1000, 500, 5000) * 20:
            timing.learn_prefill(tokens, 0, per_token_s * tokens)
            timing.learn_transfer(tokens, transfer_s)

    def schedule(
        self, hashes: Sequence[int] = PROMPT, tokens: int = TOKENS, *, may_wait: bool = False, **wishes: Any
    ) -> Decision:
        self.placed += 1
        request = Request(f"r{self.placed}", wishes.pop("model", "model"), hashes, tokens, **wishes)
        return self.scheduler.schedule(request, self.now, may_wait=may_wait)


def names_of(decision: Decision) -> tuple[str | None, str]:
    """Of the prefill and the decode worker."""
    prefill = decision.prefill
    return prefill.worker.instance_id if prefill else None, decision.decode.worker.instance_id


def test_a_prompt_goes_to_the_prefill_worker_that_holds_it_and_the_decode_worker_with_room() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"), instance("d2"))
    router.hold("p2", PROMPT[:20])
    router.load("d1", requests=4, blocks=100)
    decision = router.schedule()
    assert names_of(decision) == ("p2", "d2")
    assert decision.computes.held_blocks == 20
    assert decision.computes.uncached_tokens == TOKENS - 20 * 16


def test_load_outweighs_a_cached_prefix_when_it_is_large_enough() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"))
    router.hold("p2", PROMPT[:20])
    router.load("p2", requests=3, tokens=4000)
    assert names_of(router.schedule()) == ("p1", "d1")


def test_without_prefill_workers_decode_serves_whole_where_the_prefix_is() -> None:
    router = Router(instance("d1"), instance("d2"))
    router.hold("d2", PROMPT)
    decision = router.schedule()
    assert names_of(decision) == (None, "d2")
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
    assert {names_of(router.schedule())[1] for _ in range(20)} == {"d2"}
    assert {names_of(router.schedule(excluded=["d2"]))[1] for _ in range(20)} == {"d4"}
    with pytest.raises(Unavailable, match="d3 is draining") as failed:
        router.schedule(excluded=["d2", "d4"])
    assert failed.value.retry_after_s > 0
    assert "d2 is excluded" in failed.value.message


def test_a_quiet_prefill_worker_is_not_waited_for() -> None:
    router = Router(instance("p1", state=State.SUSPECT), instance("d1"))
    assert names_of(router.schedule()) == (None, "d1")


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
    assert {names_of(router.schedule())[1] for _ in range(10)} == {"d1"}


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
    assert names_of(router.schedule()) == (None, "d1")
    router = Router(instance("p1", kv_format=other), instance("p2"), instance("d1"), instance("d2", kv_format=other))
    router.hold("p1", PROMPT)
    pairs = {names_of(router.schedule()) for _ in range(40)}
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
    assert {names_of(router.schedule()) for _ in range(10)} == {("p1", "d1")}
    filtered = router.schedule().filtered()
    assert [(worker.instance_id, "equal KV formats" in reason) for worker, reason in filtered] == [("d2", True)]


def test_a_burst_of_one_new_prefix_stays_together_before_any_event_came() -> None:
    router = Router(*(instance(f"d{number}") for number in range(8)))
    first = names_of(router.schedule())[1]
    router.book.freed("r1")
    assert names_of(router.schedule())[1] == first


def test_own_placements_spread_a_burst_of_different_prompts() -> None:
    router = Router(*(instance(f"d{number}") for number in range(4)))
    chosen = Counter(names_of(router.schedule(range(at, at + 32)))[1] for at in range(1000, 9000, 1000))
    assert sorted(chosen.values()) == [2, 2, 2, 2]


def test_equals_are_drawn_at_random() -> None:
    chosen = Counter[str]()
    router = Router(*(instance(f"d{number}") for number in range(4)))
    for at in range(400):
        decision = router.schedule(range(1000 * at + 1, 1000 * at + 33))
        chosen[names_of(decision)[1]] += 1
        router.book.freed(f"r{router.placed}")
    assert all(60 < count < 140 for count in chosen.values())


def test_round_robin_takes_turns_in_both_roles() -> None:
    router = Router(instance("p1"), instance("p2"), instance("d1"), instance("d2"), policy="round_robin")
    router.hold("p1", PROMPT)
    pairs = [names_of(router.schedule()) for _ in range(4)]
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


def test_a_lora_labels_and_capabilities_must_be_the_workers() -> None:
    router = Router(
        instance("d1", labels={"zone": "a"}, capabilities=("seed",)),
        instance("d2", labels={"zone": "b", "gpu": "h100"}, loras=("tuned",)),
    )
    assert names_of(router.schedule(labels={"zone": "a"})) == (None, "d1")
    assert names_of(router.schedule(capabilities=["seed"])) == (None, "d1")
    assert names_of(router.schedule(lora="tuned", labels={"zone": "b"})) == (None, "d2")
    assert [reason for _, reason in router.schedule(lora="tuned").filtered()] == ["without LoRA tuned"]
    with pytest.raises(Unavailable, match="d1 is not capable of penalties, d2 is not capable of penalties"):
        router.schedule(capabilities=["penalties"])
    with pytest.raises(Unavailable, match="d1 is not labelled gpu=h100"):
        router.schedule(labels={"zone": "a", "gpu": "h100"})


def test_avoided_workers_serve_only_when_no_other_can() -> None:
    router = Router(instance("d1"), instance("d2"), instance("d3", state=State.SUSPECT))
    decision = router.schedule(avoided=["d1"])
    assert names_of(decision) == (None, "d2")
    assert ("d1", "avoided") in [(worker.instance_id, reason) for worker, reason in decision.filtered()]
    assert names_of(router.schedule(avoided=["d1"], excluded=["d2"])) == (None, "d1")
    assert names_of(router.schedule(excluded=["d1", "d2"])) == (None, "d3")


def test_a_pinned_request_goes_to_that_decode_worker_or_nowhere() -> None:
    router = Router(instance("p1"), instance("d1"), instance("d2"))
    router.load("d2", requests=9, blocks=500)
    assert names_of(router.schedule(pinned="d2")) == ("p1", "d2")
    with pytest.raises(Unavailable, match="d1 is pinned to another"):
        router.schedule(pinned="d9")
    with pytest.raises(Unavailable):
        router.schedule(pinned="d2", excluded=["d2"])


def test_a_session_stays_with_its_worker_while_that_has_room() -> None:
    router = Router(instance("d1"), instance("d2"))
    home = names_of(router.schedule(session_id="s"))[1]
    other = "d2" if home == "d1" else "d1"
    router.load(home, requests=5, tokens=9000, blocks=100)
    assert names_of(router.schedule(session_id="s"))[1] == home
    assert names_of(router.schedule(session_id="another"))[1] == other
    router.load(home, requests=16, tokens=9000, blocks=100)
    assert names_of(router.schedule(session_id="s"))[1] == other
    assert names_of(router.schedule(session_id="s"))[1] == other  # it lives there now


def test_a_hard_session_goes_nowhere_else_as_long_as_its_worker_lives() -> None:
    router = Router(instance("d1"), instance("d2"))
    home = names_of(router.schedule(session_id="s"))[1]
    other = "d2" if home == "d1" else "d1"
    router.load(home, requests=16)
    assert names_of(router.schedule(session_id="s", session_hard=True))[1] == home
    with pytest.raises(NoRoom):
        router.schedule(session_id="s", session_hard=True, may_wait=True)
    with pytest.raises(Unavailable, match=f"not {home}, where the session is"):
        router.schedule(session_id="s", session_hard=True, excluded=[home])
    router.roster.update([instance(home, state=State.DRAINING), instance(other)])
    assert names_of(router.schedule(session_id="s", session_hard=True))[1] == other


def test_a_session_is_forgotten_after_its_time() -> None:
    router = Router(instance("d1"), instance("d2"))
    home = names_of(router.schedule(session_id="s"))[1]
    router.load(home, requests=5, tokens=9000)
    router.now += 10_000
    assert names_of(router.schedule(session_id="s"))[1] != home


@pytest.mark.parametrize("full", [{"requests": 16}, {"requests": 1, "blocks": 980}])
def test_a_full_worker_comes_after_all_with_room_and_a_request_that_may_wait_is_told(full: dict[str, int]) -> None:
    router = Router(instance("d1"), instance("d2"))
    router.hold("d1", PROMPT[:8])
    router.load("d1", **full)
    router.load("d2", requests=15, tokens=90_000)
    assert names_of(router.schedule(may_wait=True)) == (None, "d2")
    router.load("d2", **full)
    before = router.book.load("d1").requests, router.book.load("d2").requests
    with pytest.raises(NoRoom, match="all 2 workers are full") as failed:
        router.schedule(range(100, 132), may_wait=True)
    assert failed.value.retry_after_s > 0
    assert before == (router.book.load("d1").requests, router.book.load("d2").requests)
    assert names_of(router.schedule())[1] in ("d1", "d2")


def test_an_idle_worker_is_never_full() -> None:
    router = Router(instance("d1"))
    assert names_of(router.schedule(range(1, 2001), 2000 * 16, may_wait=True)) == (None, "d1")


def test_ttft_prefills_remotely_only_where_that_is_predicted_to_be_faster() -> None:
    router = Router(instance("p1"), instance("d1"), policy="ttft")
    assert names_of(router.schedule()) == ("p1", "d1")  # nothing is measured: as told
    router.teach("p1", per_token_s=1e-3)
    router.teach("d1", per_token_s=1e-3, transfer_s=0.05)
    router.load("d1", requests=4, tokens=3000)
    assert names_of(router.schedule()) == ("p1", "d1")
    router.load("d1")
    router.load("p1", requests=4, tokens=3000)
    decision = router.schedule()
    assert names_of(decision) == (None, "d1")
    assert "by remote prefill, as predicted" in decision.why
    router.load("d1", blocks=400)
    router.load("p1", requests=8, tokens=9000)
    assert names_of(router.schedule()) == ("p1", "d1"), "a decode worker whose memory fills has better things to do"


def test_ttft_takes_the_faster_of_two_equally_busy_workers() -> None:
    router = Router(instance("d1"), instance("d2"), policy="ttft")
    router.teach("d1", per_token_s=1e-4)
    router.teach("d2", per_token_s=3e-4)
    assert {names_of(router.schedule(range(at, at + 32)))[1] for at in (1000, 2000)} == {"d1"}


def test_a_predicted_step_over_the_limit_puts_a_worker_behind_the_others() -> None:
    router = Router(instance("d1"), instance("d2"), policy="ttft", parameters=Parameters(max_itl_s=0.02))
    router.hold("d1", PROMPT)
    for step_s in (0.03,) * 60:
        router.load("d1", requests=4, blocks=100, step_s=step_s)
        router.load("d2", requests=4, blocks=100, step_s=0.01)
        router.scheduler.freed(f"r{router.placed}")
        chosen = names_of(router.schedule())[1]
    assert chosen == "d2"


@pytest.mark.parametrize("policy", ["lmetric", "ttft", "linear", "least_loaded", "round_robin"])
def test_a_brand_new_worker_is_neither_starved_nor_flooded(policy: str) -> None:
    """Requests of ten seconds come twice a second; a third worker joins when all is in balance."""
    router, chance = Router(instance("d1"), instance("d2"), policy=policy), random.Random(5)
    chosen: list[str] = []
    for number in range(200):
        if number == 100:
            router.roster.update([instance("d1"), instance("d2"), instance("d3")])
        router.now += 0.5
        start = chance.randrange(1 << 60)
        chosen.append(names_of(router.schedule(range(start, start + 32)))[1])
        if number >= 4:
            router.scheduler.first_token(f"r{number - 3}", router.now, 2.0)
        if number >= 20:
            router.scheduler.freed(f"r{number - 19}")
    joined = Counter(chosen[100:120])
    assert 20 / 3 * 0.6 <= joined["d3"] <= 14
    assert 80 / 3 / 2 < Counter(chosen[120:])["d3"] < 80 / 3 * 1.5


@pytest.mark.parametrize("policy", ["lmetric", "ttft", "linear"])
def test_a_system_prompt_of_everybody_sends_not_everybody_to_one_worker(policy: str) -> None:
    router, chance = Router(*(instance(f"d{number}") for number in range(4)), policy=policy), random.Random(6)
    router.hold("d0", PROMPT[:4])
    chosen = Counter[str]()
    for number in range(200):
        router.now += 0.25
        start = chance.randrange(1 << 60)
        hashes = [*PROMPT[:4], *range(start, start + 28)]
        name = names_of(router.schedule(hashes))[1]
        chosen[name] += 1
        router.hold(name, hashes)
        if number >= 8:
            router.scheduler.first_token(f"r{number - 7}", router.now, 2.0)
            router.scheduler.freed(f"r{number - 7}")
    assert max(chosen.values()) <= 1.25 * 200 / 4


def test_what_came_of_a_decision_is_remembered_with_it() -> None:
    router = Router(instance("p1"), instance("d1"))
    decision = router.schedule()
    router.scheduler.prefilled("r1", router.now + 1, 0.8, 96)
    router.scheduler.first_token("r1", router.now + 1, 0.9)
    router.scheduler.freed("r1", 500, 42)
    outcome = decision.outcome
    assert (outcome.cached_tokens, outcome.prefill_s, outcome.ttft_s, outcome.completion_tokens) == (96, 0.8, 0.9, 42)


def test_a_slower_tier_counts_for_less_than_the_engines_own_memory() -> None:
    router = Router(instance("d1"), instance("d2"), instance("d3"))
    router.index.store(router.holders["d1"], None, PROMPT, Tier.DISK)
    router.index.store(router.holders["d2"], None, PROMPT, Tier.HOST)
    router.hold("d3", PROMPT[:4])
    decision = router.schedule()
    assert names_of(decision) == (None, "d2")
    assert decision.decode.held_blocks == 32
    assert 3 < decision.decode.uncached_tokens < 256
    uncached = {one.worker.instance_id: one.uncached_tokens for one in decision.compared()}
    assert uncached["d2"] < uncached["d1"] < uncached["d3"]


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(POLICIES)))
def test_a_decision_always_takes_a_fitting_worker_of_the_lowest_score(chance: random.Random, policy: str) -> None:
    states = [chance.choice(list(State)) for _ in range(8)]
    names = [f"{chance.choice('pd')}{number}" for number in range(8)]
    router = Router(*(instance(name, state=state) for name, state in zip(names, states, strict=True)), policy=policy)
    for name in names:
        if chance.random() < 0.5:
            router.hold(name, PROMPT[: chance.randrange(1, 33)])
        router.load(name, requests=chance.randrange(20), tokens=chance.randrange(9999), blocks=chance.randrange(1000))
    excluded = [name for name in names if chance.random() < 0.2]
    good = (State.READY, State.SUSPECT)
    usable = {name: state for name, state in zip(names, states, strict=True) if name not in excluded and state in good}
    decoders = [name for name in usable if name.startswith("d")]
    if not decoders:
        with pytest.raises(Unavailable):
            router.schedule(excluded=excluded)
        return
    decision = router.schedule(excluded=excluded)
    prefill, decode = names_of(decision)
    assert decode in decoders
    assert usable[decode] is State.READY or all(usable[name] is State.SUSPECT for name in decoders)
    if prefill is not None:
        assert prefill.startswith("p")
        assert usable[prefill] is State.READY
    for chosen in (decision.decode, decision.prefill):
        if chosen is not None:
            rows = chosen.candidates
            room = [at for at in range(len(rows)) if has_room(rows, at)]
            among = room or range(len(rows))
            assert chosen.score == min(rows.scores[at] for at in among)
    everyone = {one.worker.instance_id for one in decision.compared()} | {w.instance_id for w, _ in decision.filtered()}
    assert everyone == set(names)


def has_room(rows: Candidates, at: int) -> bool:
    requests, worker = rows.requests[at], rows.workers[at]
    blocks = rows.kv_blocks[at] + rows.needed[at]
    return not requests or (requests < worker.max_num_seqs and blocks <= worker.total_blocks)


@given(st.randoms(use_true_random=False))
def test_equal_seeds_and_clocks_make_equal_decisions(chance: random.Random) -> None:
    seed, made = chance.getrandbits(32), []
    for _ in range(2):
        router, again = Router(*(instance(f"d{at}") for at in range(5)), policy="ttft"), random.Random(seed)
        mine = []
        for number in range(30):
            router.now += again.random()
            start = again.randrange(1000) * 8
            mine.append(names_of(router.schedule(range(start, start + 32)))[1])
            if number > 3:
                router.scheduler.first_token(f"r{number - 3}", router.now, again.random())
        made.append(mine)
    assert made[0] == made[1]


def test_a_backlog_is_what_a_newcomer_would_wait_for() -> None:
    router = Router(instance("d-1"), instance("d-2"))
    request = Request("newcomer", "model", PROMPT, TOKENS)
    router.load("d-1", requests=40)
    assert router.scheduler.backlog(request) == 0, "the other would begin it"
    router.load("d-2", requests=20)
    assert router.scheduler.backlog(request) == 2 * (20 - 16), "it would go there, and both are as fast"


def test_prompts_at_prefill_workers_are_a_backlog_as_they_are_computed_one_after_another() -> None:
    router = Router(instance("d-1"), instance("p-1"), instance("p-2"))
    request = Request("newcomer", "model", PROMPT, TOKENS)
    router.load("p-1", requests=3)
    assert router.scheduler.backlog(request) == 0
    router.load("p-2", requests=2)
    assert router.scheduler.backlog(request) == 2 * 2
