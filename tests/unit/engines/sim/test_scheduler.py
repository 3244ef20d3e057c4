from __future__ import annotations

from array import array
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.base import FinishReason, KvOutcome, SamplingParams
from engines.sim.profile import Profile
from engines.sim.scheduler import Scheduler, Step
from engines.sim.sequence import Sequence, Stage, TokenSequence
from engines.sim.tokens import TokenSource, builtin_vocabulary
from kvcache.events import Cleared, Removed, Stored
from kvcache.hashing import hash_blocks

BLOCK = 4
ROOT, SEED = 11, 22
PROFILE = Profile(step_us=1000, prefill_us=100, decode_us=10, context_us=1)
VOCABULARY = builtin_vocabulary()


def make_scheduler(total_blocks: int = 64, max_num_seqs: int = 8, max_batched_tokens: int = 64) -> Scheduler:
    return Scheduler(total_blocks, BLOCK, max_num_seqs, max_batched_tokens, PROFILE)


def make_sequence(request_id: str, prompt: list[int], count: int = 5, **more: Any) -> TokenSequence:
    sampling = more.pop("sampling", SamplingParams())
    tokens = array("I", prompt)
    return TokenSequence(
        request_id,
        tokens,
        hash_blocks(tokens, BLOCK, ROOT, SEED),
        sampling,
        TokenSource(VOCABULARY, tokens, 0, 0),
        block_size=BLOCK,
        hash_root=ROOT,
        hash_seed=SEED,
        end_at=len(prompt) + count,
        **more,
    )


def expected(prompt: list[int], count: int) -> list[int]:
    """The naive model: one sequence alone, token by token."""
    source = TokenSource(VOCABULARY, array("I", prompt), 0, 0)
    return [source.next(True) for _ in range(count)]


def run(scheduler: Scheduler, now: float = 0.0) -> list[Step]:
    """Steps until nothing moves; reads succeed at once, prefilled sequences are held without end."""
    steps = []
    while not (step := scheduler.step(now)).did_nothing:
        steps.append(step)
        for sequence in step.reads:
            scheduler.finish_read(sequence, KvOutcome.READ)
        for sequence in step.prefilled:
            scheduler.hold(sequence, sequence.request_id, float("inf"))
        scheduler.check_integrity()
    return steps


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    scheduler = make_scheduler(max_batched_tokens=10)
    scheduler.add(sequence := make_sequence("a", list(range(25)), 3))
    steps = run(scheduler)
    assert [len(step.emitted) for step in steps] == [0, 0, 1, 1, 1]
    assert list(sequence.tokens[25:]) == expected(list(range(25)), 3)
    assert scheduler.load().kv_used_blocks == 0


def test_prompt_tokens_are_queued_until_they_are_computed_and_answers_never_are() -> None:
    scheduler = make_scheduler(max_batched_tokens=10)
    scheduler.add(make_sequence("a", list(range(25)), 3))
    queued = [scheduler.load().queued_prefill_tokens]
    for _ in range(4):
        scheduler.step(0.0)
        queued.append(scheduler.load().queued_prefill_tokens)
    assert queued == [25, 15, 5, 0, 0]


def test_a_steps_time_is_the_profiles_sum() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", list(range(20)), 2))
    first, second = run(scheduler)
    assert first.duration_s == 0.003
    assert second.duration_s == 0.00103


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_always_is() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", list(range(16)), 1))
    run(scheduler)
    scheduler.add(again := make_sequence("b", list(range(16)), 1))
    (step,) = run(scheduler)
    assert again.usage.cached_tokens == 12
    assert step.duration_s == 0.0014


def test_stored_blocks_name_their_parent_and_evicted_ones_are_removed() -> None:
    scheduler = make_scheduler(total_blocks=4)
    scheduler.add(sequence := make_sequence("a", list(range(8)), 5))
    run(scheduler)
    hashes = sequence.hashes
    assert scheduler.drain_events() == [Stored(None, (hashes[0], hashes[1])), Stored(hashes[1], (hashes[2],))]
    assert hashes == hash_blocks(sequence.tokens[:12], BLOCK, ROOT, SEED)
    scheduler.add(make_sequence("b", list(range(50, 62)), 1))
    run(scheduler)
    removed = [event for event in scheduler.drain_events() if isinstance(event, Removed)]
    assert removed == [Removed((hashes[2], hashes[1]))]


def test_when_blocks_run_out_the_last_is_preempted_and_says_the_same() -> None:
    scheduler = make_scheduler(total_blocks=8)
    prompts = [[n] * 8 for n in range(3)]
    sequences = [make_sequence(str(n), prompt, 16) for n, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    steps = run(scheduler)
    assert [sequence.request_id for step in steps for sequence, finish in step.emitted if finish] == ["0", "1", "2"]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert list(sequence.tokens[8:]) == expected(prompt, 16)


def test_higher_priority_is_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("low", [1], 1))
    scheduler.add(make_sequence("high", [2], 1, priority=1))
    assert [step.emitted[0][0].request_id for step in run(scheduler)] == ["high", "low"]


def test_a_stop_token_ends_an_answer_but_not_before_min_tokens() -> None:
    stop = expected([1, 2, 3], 2)[1]
    for min_tokens, length in ((0, 2), (2, 10)):
        scheduler = make_scheduler()
        sampling = SamplingParams(stop_token_ids=(stop,), min_tokens=min_tokens)
        scheduler.add(sequence := make_sequence("a", [1, 2, 3], 10, sampling=sampling))
        finish = run(scheduler)[-1].emitted[-1][1]
        if min_tokens:
            assert stop not in sequence.tokens[3:5]
        else:
            assert finish is FinishReason.STOP
            assert sequence.usage.completion_tokens == length


def test_a_held_prompt_keeps_its_full_blocks_until_released_or_expired() -> None:
    scheduler = make_scheduler()
    for name in ("read", "left"):
        scheduler.add(make_sequence(name, list(range(13)), 1, prefill_only=True))
        step = scheduler.step(0.0)
        scheduler.hold(step.prefilled[0], name, 10.0)
    assert scheduler.load().kv_leased_blocks == 6
    assert scheduler.release("read")
    assert not scheduler.release("read")
    assert scheduler.next_expiry() == 10.0
    scheduler.step(9.9)
    assert scheduler.load().kv_leases == 1
    scheduler.step(10.0)
    assert scheduler.load().kv_used_blocks == 0
    assert scheduler.load().kv_leases_expired == 1
    assert not scheduler.release("left")
    scheduler.check_integrity()


def test_read_blocks_count_as_remote_and_can_be_found_afterwards() -> None:
    scheduler = make_scheduler()
    prompt = list(range(14))
    scheduler.add(sequence := make_sequence("a", prompt, 2, handle_blocks=3))
    (reading,) = scheduler.step(0.0).reads
    assert reading is sequence
    assert len(sequence.blocks) == 4
    scheduler.finish_read(sequence, KvOutcome.READ)
    assert scheduler.drain_events() == [Stored(None, tuple(sequence.hashes))]
    run(scheduler)
    assert sequence.usage.remote_tokens == 12
    assert sequence.usage.cached_tokens == 0
    assert sequence.kv_outcome is KvOutcome.READ
    assert list(sequence.tokens[14:]) == expected(prompt, 2)


def test_what_the_own_cache_has_is_not_read() -> None:
    scheduler = make_scheduler()
    prompt = list(range(14))
    scheduler.add(make_sequence("a", prompt, 1))
    run(scheduler)
    scheduler.add(sequence := make_sequence("b", prompt, 1, handle_blocks=3))
    step = scheduler.step(0.0)
    assert step.unneeded == [sequence]
    assert sequence.kv_outcome is KvOutcome.LOCAL
    assert sequence.usage.cached_tokens == 12


def test_a_failed_read_is_computed_here_and_says_the_same() -> None:
    scheduler = make_scheduler()
    prompt = list(range(14))
    scheduler.add(sequence := make_sequence("a", prompt, 4, handle_blocks=3))
    scheduler.step(0.0)
    scheduler.finish_read(sequence, KvOutcome.CORRUPT)
    run(scheduler)
    assert list(sequence.tokens[14:]) == expected(prompt, 4)
    assert sequence.usage.remote_tokens == 0
    assert sequence.kv_outcome is KvOutcome.CORRUPT


def test_the_destination_of_an_abandoned_read_is_not_reused_before_it_has_ended() -> None:
    scheduler = make_scheduler(total_blocks=8)
    scheduler.add(sequence := make_sequence("a", list(range(14)), 2, handle_blocks=3))
    scheduler.step(0.0)
    adrift = scheduler.abandon_read(sequence, KvOutcome.UNREACHABLE)
    scheduler.add(make_sequence("b", list(range(100, 112)), 4))
    for step in run(scheduler):
        assert not {block for block, _ in step.filled} & set(adrift)
    assert sequence.stage is Stage.ENDED
    assert scheduler.load().kv_used_blocks == 4
    scheduler.reclaim(adrift)
    assert scheduler.load().kv_used_blocks == 0
    scheduler.check_integrity()


def test_an_abort_during_a_read_keeps_the_blocks_until_the_read_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence("a", list(range(14)), 4, handle_blocks=3))
    scheduler.step(0.0)
    assert scheduler.abort("a") is sequence
    assert scheduler.load().kv_used_blocks == 4
    scheduler.finish_read(sequence, KvOutcome.READ)
    assert scheduler.load().kv_used_blocks == 0
    assert scheduler.abort("a") is None


def test_read_prompts_that_fill_all_blocks_do_not_block_each_other_for_ever() -> None:
    scheduler = make_scheduler(total_blocks=8)
    prompts = [[n] * 16 for n in range(2)]
    sequences = [make_sequence(str(n), prompt, 8, handle_blocks=3) for n, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert list(sequence.tokens[16:]) == expected(prompt, 8)


def test_the_only_one_running_goes_on_when_blocks_that_wait_for_their_turn_are_in_its_way() -> None:
    scheduler = make_scheduler(total_blocks=8, max_num_seqs=2)
    scheduler.add(running := make_sequence("running", [1] * 8, 16))
    scheduler.step(0.0)
    scheduler.add(reading := make_sequence("reading", [2] * 17, 4, handle_blocks=4))
    scheduler.step(0.0)
    scheduler.finish_read(reading, KvOutcome.READ)
    scheduler._max_num_seqs = 1  # it stays in line with its blocks
    run(scheduler)
    assert list(running.tokens[8:]) == expected([1] * 8, 16)
    assert list(reading.tokens[17:]) == expected([2] * 17, 4)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever comes in whatever order: no block leaks, events tell the truth, every answer is the naive one."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(total_blocks=12, max_num_seqs=4, max_batched_tokens=10)
        self.now = 0.0
        self.names = 0
        self.sequences: dict[str, tuple[TokenSequence, list[int], int]] = {}
        self.reading: list[Sequence] = []
        self.adrift: list[list[int]] = []
        self.held: list[str] = []
        self.told: set[int] = set()

    # Few tokens, so that prompts share prefixes; lengths around the edges of blocks.
    @rule(
        start=st.integers(0, 2),
        length=st.integers(1, 20),
        count=st.integers(1, 16),
        priority=st.integers(0, 1),
        handle=st.booleans(),
    )
    def add(self, start: int, length: int, count: int, priority: int, handle: bool) -> None:
        prompt = [start + i // 8 for i in range(length)]
        handle_blocks = (length - 1) // BLOCK if handle else 0
        self._add(make_sequence(self._name(), prompt, count, priority=priority, handle_blocks=handle_blocks), count)

    @rule(start=st.integers(0, 2), length=st.integers(1, 20))
    def prefill(self, start: int, length: int) -> None:
        prompt = [start + i // 8 for i in range(length)]
        self._add(make_sequence(self._name(), prompt, 1, prefill_only=True), 0)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._take(self.scheduler.step(self.now))

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.reading)
    @rule(outcome=st.sampled_from([KvOutcome.READ, KvOutcome.CORRUPT, KvOutcome.LATE]), data=st.data())
    def a_read_ends(self, outcome: KvOutcome, data: st.DataObject) -> None:
        self.scheduler.finish_read(self._pick(self.reading, data), outcome)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def a_read_is_abandoned(self, data: st.DataObject) -> None:
        self.adrift.append(self.scheduler.abandon_read(self._pick(self.reading, data), KvOutcome.UNREACHABLE))

    @precondition(lambda self: self.adrift)
    @rule(data=st.data())
    def an_abandoned_read_ends(self, data: st.DataObject) -> None:
        self.scheduler.reclaim(self._pick(self.adrift, data))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self._pick(self.held, data)
        self.scheduler.release(name)
        assert not self.scheduler.release(name)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        known = name in self.scheduler
        assert (self.scheduler.abort(name) is not None) == known

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()

    @invariant()
    def blocks_are_whole_and_events_true(self) -> None:
        self.scheduler.check_integrity()
        for event in self.scheduler.drain_events():
            if isinstance(event, Stored):
                assert not self.told & set(event.hashes), "stored twice"
                self.told |= set(event.hashes)
            elif isinstance(event, Removed):
                assert self.told >= set(event.hashes), "removed before it was stored"
                self.told -= set(event.hashes)
            else:
                assert isinstance(event, Cleared)
                self.told.clear()
        pool = self.scheduler._pool
        assert self.told == set(pool._found)

    def teardown(self) -> None:
        for blocks in self.adrift:
            self.scheduler.reclaim(blocks)
        while True:
            for sequence in self.reading:
                self.scheduler.finish_read(sequence, KvOutcome.READ)
            self.reading.clear()
            for name in self.held:
                self.scheduler.release(name)
            step = self.scheduler.step(self.now)
            if step.did_nothing:
                break
            self._take(step)
        assert self.scheduler.load().kv_used_blocks == 0, "a block leaked"
        for sequence, _, _ in self.sequences.values():
            assert sequence.stage is Stage.ENDED, "one never ended"

    def _name(self) -> str:
        self.names += 1
        return str(self.names)

    def _add(self, sequence: TokenSequence, count: int) -> None:
        self.sequences[sequence.request_id] = (sequence, list(sequence.tokens), count)
        self.scheduler.add(sequence)

    def _take(self, step: Step) -> None:
        for emitter, finish in step.emitted:
            sequence, prompt, count = self.sequences[emitter.request_id]
            said = list(sequence.tokens[len(prompt) :])
            assert said == expected(prompt, len(said))
            assert (finish is FinishReason.LENGTH) == (len(said) == count)
        self.reading.extend(step.reads)
        for prefilled in step.prefilled:
            self.scheduler.hold(prefilled, prefilled.request_id, self.now + 6)
            self.held.append(prefilled.request_id)

    @staticmethod
    def _pick(items: list[Any], data: st.DataObject) -> Any:
        return items.pop(data.draw(st.integers(0, len(items) - 1)))


AnyOrderOfEvents.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
