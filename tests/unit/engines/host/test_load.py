from __future__ import annotations

from prometheus_client import CollectorRegistry

from engines.base import LoadSnapshot
from engines.host.load import LoadCollector


def test_a_scrape_shows_the_latest_reading() -> None:
    registry, collector = CollectorRegistry(), LoadCollector()
    registry.register(collector)
    assert registry.get_sample_value("tokenmill_kv_leases") == 0
    collector.latest = LoadSnapshot(kv_leases=2, kv_leases_expired=5, running_requests=3)
    assert registry.get_sample_value("tokenmill_kv_leases") == 2
    assert registry.get_sample_value("tokenmill_kv_leases_expired_total") == 5
    assert registry.get_sample_value("tokenmill_running_requests") == 3
