"""Makes a router's logged decisions again, from what the log says each was made on, and compares. Pure but for reading.

Index, load book, comparison and policy are the router's own. A choice agrees when every score comes out the same and
the worker taken is one of the best: ties are broken by chance. `ttft` cannot be made again, for what it had learned by
then is not in the log; neither can a choice that a session, a pin or a full worker decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from controlplane.errors import SettingsError
from controlplane.instances import State
from kvcache.events import Stored
from kvcache.format import KvFormat
from kvcache.index import KvIndex
from kvcache.load import LoadReport
from services.router.candidates import Candidates, Job, gather
from services.router.history import Comparison, DecisionRecord
from services.router.placements import Book
from services.router.policies import POLICIES, Parameters, Policy
from services.router.timing import Timings
from services.router.workers import Group, Worker

__all__ = ["Agreement", "read_decisions", "replay_decisions"]

_LEARNING = ("ttft",)


@dataclass(slots=True)
class Agreement:
    """What came of a replay; the numbers are comparisons, of which a decision has one to three."""

    same: int = 0
    tied: int = 0
    """Of the same: more than one worker was best."""
    skipped: int = 0
    differing: list[str] = field(default_factory=list)
    """One sentence each."""


def read_decisions(path: Path) -> list[DecisionRecord]:
    """A decisions log, in the order of the decisions. Raises `SettingsError` with the line that cannot be read."""
    decoder = msgspec.json.Decoder(DecisionRecord)
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SettingsError(f"decisions log {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{path}, line {number}: {error}") from error
    return sorted(records, key=lambda record: record.at_s)


def replay_decisions(records: Iterable[DecisionRecord], parameters: Parameters) -> Agreement:
    """Every decision anew; `parameters` are those the router had."""
    agreement = Agreement()
    policies: dict[str, Policy] = {}
    for record in records:
        if record.policy in _LEARNING or record.policy not in POLICIES:
            agreement.skipped += len(record.compared)
            continue
        policy = policies.setdefault(record.policy, POLICIES[record.policy](parameters))
        for comparison in record.compared:
            _compare(record, comparison, policy, agreement)
        for comparison in sorted(record.compared, key=lambda one: one.job != Job.PREFILL):  # as the scheduler tells it
            if comparison.workers[comparison.chosen] in (record.decode, record.prefill):
                worker = _workers(record, comparison)[comparison.chosen]
                policy.chosen(Job(comparison.job), worker, record.at_s)
    return agreement


def _compare(record: DecisionRecord, then: Comparison, policy: Policy, agreement: Agreement) -> None:
    now = _candidates(record, then)
    scores = policy.score(now)
    what = f"{record.request_id}, {then.job}"
    if (now.held, now.uncached, now.needed) != (then.held, then.uncached, then.needed):
        agreement.differing.append(f"{what}: {now.held} blocks are held, not {then.held}")
    elif scores != then.scores:
        agreement.differing.append(f"{what}: the scores are {scores}, not {then.scores}")
    else:
        ranks = list(zip(scores, (-held for held in now.held), strict=True))
        best = min(ranks)
        if ranks[then.chosen] != best and not policy.temperature:
            agreement.differing.append(f"{what}: {then.workers[then.chosen]} is not the best of {then.workers}")
            return
        agreement.same += 1
        agreement.tied += ranks.count(best) > 1


def _candidates(record: DecisionRecord, then: Comparison) -> Candidates:
    """As the router gathered them, from an index and a load book that say what they said then."""
    index, book = KvIndex(), Book(ttl_s=1.0)
    hashes = tuple(record.block_hashes)
    for name, held, requests, tokens, blocks in zip(
        then.workers, then.held, then.requests, then.queued_tokens, then.kv_blocks, strict=True
    ):
        if held:
            index.apply(index.open(name), Stored(None, hashes[:held]))
        report = LoadReport(
            name, 1, 0, 0, 0, running_requests=requests, queued_prefill_tokens=tokens, kv_used_blocks=blocks
        )
        book.report(report, record.at_s)
    return gather(
        Job(then.job),
        Group(_workers(record, then)),
        index.worker_overlaps(hashes),
        len(hashes),
        record.prompt_tokens,
        book,
        Timings(),
    )


def _workers(record: DecisionRecord, then: Comparison) -> list[Worker]:
    role = "prefill" if then.job == Job.PREFILL else "decode"
    return [
        Worker(name, 1, name, role, State.READY, KvFormat(record.model, "", size, "", "", "", ""))
        for name, size in zip(then.workers, then.block_sizes, strict=True)
    ]
