from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.errors import SettingsError
from engines.sim.profile import Profile
from services.router.settings import RouterSettings
from simulator.measures import Result
from simulator.replay import PATIENT, Cluster, Limits, replay
from simulator.report import as_html, as_json
from simulator.trace import Arrival, read_trace, spread

from .traces import mooncake, write_mooncake

PROFILE = Profile(
    step_us=7_000, prefill_us=30, prefill_context_us=0.002, decode_us=15, context_us=0.05,
    kv_tokens=16_384, max_num_seqs=12, max_batched_tokens=2048,
)  # fmt: skip
AGGREGATED = Cluster(profile=PROFILE, decode=3)
APART = Cluster(profile=PROFILE, prefill=2, decode=2)
CROWDED = Cluster(profile=replace(PROFILE, kv_tokens=8_192, max_num_seqs=4), decode=2)
FINE = Cluster(profile=PROFILE, decode=2, block_size=64)


@pytest.fixture
def arrivals(tmp_path: Path) -> list[Arrival]:
    return spread(read_trace(write_mooncake(tmp_path / "trace.jsonl", mooncake(150))), seed=1)


def run(arrivals: list[Arrival], cluster: Cluster, **more: Any) -> Result:
    return replay(arrivals, cluster, RouterSettings(policy=more.pop("policy", "lmetric"), **PATIENT), **more)


@pytest.mark.parametrize("cluster", [AGGREGATED, APART, CROWDED, FINE], ids=["agg", "p/d", "crowded", "fine"])
def test_steps_taken_in_one_go_give_exactly_what_single_steps_give(arrivals: list[Arrival], cluster: Cluster) -> None:
    assert run(arrivals, cluster) == run(arrivals, cluster, collapse=False)


@settings(max_examples=15)
@example(987, APART, 15.0)  # KV read while steps are taken in one go
@given(st.integers(0, 1000), st.sampled_from([AGGREGATED, APART, CROWDED, FINE]), st.floats(0.3, 20.0))
def test_at_any_load_too(seed: int, cluster: Cluster, speed: float) -> None:
    rows = [
        Arrival(number, float(str(row["timestamp"])) / 1000, int(str(row["input_length"])), 40, tuple(row["hash_ids"]))  # type: ignore[arg-type]
        for number, row in enumerate(mooncake(40, seed, longest=5000))
    ]
    arrivals = spread(rows, seed, speed)
    assert run(arrivals, cluster) == run(arrivals, cluster, collapse=False)


@pytest.mark.parametrize("policy", ["lmetric", "round_robin"])
@pytest.mark.parametrize("cluster", [AGGREGATED, APART], ids=["agg", "p/d"])
def test_the_same_seed_gives_the_same_figures(arrivals: list[Arrival], cluster: Cluster, policy: str) -> None:
    results = [run(arrivals, cluster, policy=policy, seed=7) for _ in range(2)]
    reports = [as_json([result]) for result in results]
    assert reports[0] == reports[1]


def test_every_request_ends_once_and_every_prompt_token_is_computed_or_cached(arrivals: list[Arrival]) -> None:
    ended: list[int] = []
    result = run(arrivals, AGGREGATED, on_progress=ended.append)
    assert ended == list(range(1, len(arrivals) + 1))
    prompt_tokens = sum(one.prompt_tokens for one in arrivals)
    assert sum(result.computed_tokens.values()) == pytest.approx(prompt_tokens * (1 - result.hit_rate))
    assert result.hit_rate > 0.1


def test_one_request_alone_takes_the_profiles_time() -> None:
    alone = replay([Arrival(0, 0.0, 1000, 11, (1, 2))], AGGREGATED, RouterSettings())
    hop_ms = 0.5
    prefill_ms = 7 + 1000 * 0.03 + 1000 * 999 / 2 * 0.002e-3
    assert alone.ttft.mean == pytest.approx(hop_ms + prefill_ms)
    assert alone.itl.mean == pytest.approx(7 + 0.015 + 1004.5 * 0.05e-3)
    assert alone.e2e.mean == pytest.approx(alone.ttft.mean + 10 * alone.itl.mean)
    assert alone.load_max_over_mean == 3


def test_a_prompt_prefilled_elsewhere_pays_for_its_way() -> None:
    slow = Cluster(profile=replace(PROFILE, kv_transfer_gb_s=0.1), prefill=1, decode=1)
    fast = Cluster(profile=PROFILE, prefill=1, decode=1)
    requests = [Arrival(0, 0.0, 1025, 11, (1, 2, 3))]
    results = [replay(requests, cluster, RouterSettings()) for cluster in (fast, slow)]
    assert [result.remote_prefills for result in results] == [1, 1]
    more_ms = 1024 * 131_072 / 0.1e9 * 1000 - 1024 * 131_072 / 40e9 * 1000
    assert results[1].ttft.mean - results[0].ttft.mean == pytest.approx(more_ms)


def test_who_may_not_wait_any_longer_is_refused_and_counted(arrivals: list[Arrival]) -> None:
    crowd = [replace(one, at_s=one.at_s / 50) for one in arrivals]
    ended: list[int] = []
    settings = RouterSettings(queue_max_wait_s=1.0, worker_backlog=0.0)
    result = replay(crowd, CROWDED, settings, limits=Limits(1e9, 1e9), on_progress=ended.append)
    assert len(ended) == len(crowd)
    assert 0 < result.refused < len(crowd)
    assert result.good_share == pytest.approx(1 - result.refused / len(crowd))


def test_goodput_counts_what_kept_both_limits(arrivals: list[Arrival]) -> None:
    everything = run(arrivals, AGGREGATED, limits=Limits(1e9, 1e9))
    assert everything.good_share == 1
    assert everything.goodput == pytest.approx(len(arrivals) / everything.virtual_s)
    assert run(arrivals, AGGREGATED, limits=Limits(1e9, 0.001)).good_share < 0.1
    assert run(arrivals, AGGREGATED, limits=Limits(0.001, 1e9)).good_share == 0


def test_a_request_too_long_for_a_worker_is_refused_before_anything_runs() -> None:
    with pytest.raises(SettingsError, match="request 3 of the trace has 20001 tokens"):
        replay([Arrival(3, 0.0, 20_000, 1)], AGGREGATED, RouterSettings())


def test_a_cluster_needs_somebody_who_decodes() -> None:
    with pytest.raises(SettingsError, match="must decode"):
        Cluster(profile=PROFILE, prefill=2, decode=0)


def test_the_json_has_what_programs_read_and_the_page_stands_alone(arrivals: list[Arrival]) -> None:
    results = [run(arrivals, AGGREGATED, policy=policy) for policy in ("lmetric", "round_robin")]
    figures = as_json(results)
    assert list(figures["policies"]) == ["lmetric", "round_robin"]
    for figure in figures["policies"].values():
        assert {"ttft_ms", "itl_ms", "e2e_ms", "hit_rate", "load_max_over_mean", "goodput"} <= figure.keys()
        assert {"mean", "p50", "p99"} <= figure["ttft_ms"].keys()
    page = as_html("a <trace>", results, Limits())
    assert "a &lt;trace&gt;" in page
    assert "<svg" in page
    assert "http" not in page
