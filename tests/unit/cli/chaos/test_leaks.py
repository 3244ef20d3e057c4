import pytest

from cli.chaos.leaks import held, most, outgrown

IDLE = {
    "tokenmill_kv_leases": 0.0,
    "tokenmill_running_requests": 0.0,
    "process_open_fds": 40.0,
    "tokenmill_asyncio_tasks": 30.0,
    "process_resident_memory_bytes": 100e6,
}


def test_an_idle_process_holds_nothing() -> None:
    assert held(IDLE) == []


@pytest.mark.parametrize(
    "name",
    [
        "tokenmill_kv_leases",
        "tokenmill_kv_leased_blocks",
        "tokenmill_kv_used_blocks",
        "tokenmill_running_requests",
        "tokenmill_running_answers",
        "tokenmill_router_placements",
    ],
)
def test_what_is_still_held_is_found(name: str) -> None:
    (found,) = held(IDLE | {name: 2.0})
    assert found.startswith("2 ")


@pytest.mark.parametrize(
    ("name", "leaked"),
    [("process_open_fds", 300.0), ("tokenmill_asyncio_tasks", 300.0), ("process_resident_memory_bytes", 400e6)],
)
def test_what_has_grown_past_its_bound_is_found(name: str, leaked: float) -> None:
    baseline = most([IDLE, IDLE | {name: IDLE[name] + 1}])
    assert outgrown(baseline, IDLE) == []
    (found,) = outgrown(baseline, IDLE | {name: leaked})
    assert "at the beginning" in found


def test_without_a_baseline_nothing_has_grown() -> None:
    assert outgrown({}, IDLE) == []
