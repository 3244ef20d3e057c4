"""How busy the engine is, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.base import LoadSnapshot

__all__ = ["LoadCollector"]


class LoadCollector(Collector):
    """Shows the latest reading. Scrapes come on a thread of their own, where an engine must not be asked."""

    def __init__(self) -> None:
        self.latest = LoadSnapshot()

    def collect(self) -> Iterable[Metric]:
        """The latest reading, as metrics."""
        load = self.latest
        for name, documentation, value in (
            ("tokenmill_running_requests", "Requests in the engine's batch", load.running_requests),
            ("tokenmill_waiting_requests", "Requests the engine has not begun", load.waiting_requests),
            (
                "tokenmill_queued_prefill_tokens",
                "Prompt tokens accepted and not yet computed",
                load.queued_prefill_tokens,
            ),
            ("tokenmill_kv_used_blocks", "KV blocks in use", load.kv_used_blocks),
            ("tokenmill_kv_total_blocks", "KV blocks in all", load.kv_total_blocks),
            ("tokenmill_kv_leased_blocks", "KV blocks held for readers", load.kv_leased_blocks),
            ("tokenmill_kv_leases", "Handles not yet read, released or expired", load.kv_leases),
            ("tokenmill_step_time_seconds", "Mean time of recent steps", load.step_time_s),
        ):
            yield GaugeMetricFamily(name, documentation, value=value)
        yield CounterMetricFamily("tokenmill_steps", "Engine steps", value=load.steps)
        yield CounterMetricFamily(
            "tokenmill_kv_leases_expired", "Handles whose lease ended unread", value=load.kv_leases_expired
        )
