"""A decision as protobuf, for `Explain` and for those who ask along with `Schedule`."""

from __future__ import annotations

from collections.abc import Iterator

from services.router.candidates import Candidate
from services.router.decision import Decision
from tokenmill.router.v1 import router_pb2

__all__ = ["all_candidates", "explained"]


def explained(decision: Decision, policy: str, now: float) -> router_pb2.ExplainResponse:
    """All that is known of a decision."""
    request, outcome, computes = decision.request, decision.outcome, decision.computes
    return router_pb2.ExplainResponse(
        request_id=request.request_id,
        model=request.model,
        policy=policy,
        prompt_tokens=request.prompt_tokens,
        blocks=len(request.block_hashes),
        age_ms=round(1000 * (now - decision.at)),
        decode=decision.decode.worker.instance_id,
        prefill=decision.prefill.worker.instance_id if decision.prefill is not None else "",
        why=decision.why,
        comparisons=[
            router_pb2.Comparison(
                job=candidates.job,
                best=candidates.workers[candidates.chosen].instance_id,
                candidates=[_candidate(Candidate(candidates, at)) for at in range(len(candidates))],
            )
            for candidates in decision.seen
        ],
        filtered=_filtered(decision),
        predicted_ttft_ms=round(1000 * decision.predicted_ttft_s),
        expected_cached_tokens=request.prompt_tokens - computes.uncached_tokens,
        cached_tokens=outcome.cached_tokens,
        prefill_ms=_ms(outcome.prefill_s),
        ttft_ms=_ms(outcome.ttft_s),
        completion_tokens=outcome.completion_tokens,
    )


def all_candidates(decision: Decision) -> Iterator[router_pb2.Candidate]:
    """Every worker of the model: as it was compared, or why it was not."""
    yield from map(_candidate, decision.compared())
    yield from _filtered(decision)


def _candidate(candidate: Candidate) -> router_pb2.Candidate:
    worker = candidate.worker
    return router_pb2.Candidate(
        instance_id=worker.instance_id, role=worker.role, score=candidate.score, terms=candidate.terms
    )


def _filtered(decision: Decision) -> Iterator[router_pb2.Candidate]:
    for worker, reason in decision.filtered():
        yield router_pb2.Candidate(instance_id=worker.instance_id, role=worker.role, filtered=reason)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)
