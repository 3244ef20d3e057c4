from __future__ import annotations

from prometheus_client import CollectorRegistry

from engines.base import LoadSnapshot
from engines.host.load import LoadCollector, StallWatch


def test_an_engine_with_requests_and_no_steps_is_noticed() -> None:
    watch = StallWatch(most_readings=3)
    for _ in range(4):
        watch.observe(LoadSnapshot(running_requests=1, steps=7))
        assert not watch.stalled
    watch.observe(LoadSnapshot(running_requests=1, steps=7))
    assert watch.stalled
    watch.observe(LoadSnapshot(running_requests=1, steps=8))
    assert not watch.stalled


def test_an_idle_engine_may_stand_still() -> None:
    watch = StallWatch(most_readings=1)
    for _ in range(10):
        watch.observe(LoadSnapshot(running_requests=0, steps=7))
    assert not watch.stalled


def test_a_scrape_shows_the_latest_reading() -> None:
    registry, collector = CollectorRegistry(), LoadCollector()
    registry.register(collector)
    assert registry.get_sample_value("tokenmill_kv_leases") == 0
    collector.latest = LoadSnapshot(kv_leases=2, kv_leases_expired=5, running_requests=3)
    assert registry.get_sample_value("tokenmill_kv_leases") == 2
    assert registry.get_sample_value("tokenmill_kv_leases_expired_total") == 5
    assert registry.get_sample_value("tokenmill_running_requests") == 3
