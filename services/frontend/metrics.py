"""What the frontend counts. Names are part of the product."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

__all__ = ["FrontendMetrics", "TokenHistogram"]

_TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class TokenHistogram(Collector):
    """A histogram that takes one observation for several tokens. Cheap enough to be asked about every token."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._counts = [0] * (len(_ITL_BOUNDS_S) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int) -> None:
        """`count` tokens, each `seconds` after the one before."""
        self._counts[bisect_left(_ITL_BOUNDS_S, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As Prometheus wants it: cumulative."""
        total = 0
        buckets = []
        for bound, count in zip((*_ITL_BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class FrontendMetrics:
    """All of one frontend."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("tokenmill_requests", "Finished requests", ["endpoint", "status"], registry=registry)
        self.running = Gauge("tokenmill_running_answers", "Answers in the making", registry=registry)
        self.ttft = Histogram(
            "tokenmill_ttft_seconds",
            "From a request's dispatch to its first token",
            buckets=_TTFT_BOUNDS_S,
            registry=registry,
        )
        self.itl = TokenHistogram("tokenmill_itl_seconds", "Between one token of an answer and the next", registry)
        self.prompt_tokens = Counter("tokenmill_prompt_tokens", "Tokens of dispatched prompts", registry=registry)
        self.completion_tokens = Counter("tokenmill_completion_tokens", "Tokens generated", registry=registry)
        self.blind = Counter(
            "tokenmill_schedule_blind", "Requests placed without the router's advice", registry=registry
        )
        self.prefill_fallbacks = Counter(
            "tokenmill_prefill_fallbacks",
            "Remote prefills that failed, so decode computed the prompt",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "tokenmill_retries", "Requests begun again on another worker", ["reason"], registry=registry
        )
        self.migrations = Counter(
            "tokenmill_migrations", "Answers that went on on another worker", ["reason"], registry=registry
        )
        self.lost_streams = Counter(
            "tokenmill_decode_streams_lost", "Broken streams to decode workers", registry=registry
        )
        self.cancelled = Counter(
            "tokenmill_cancelled",
            "Answers cancelled because their client had gone or did not read, by how far they had come",
            ["stage"],
            registry=registry,
        )
        self.breakers = Gauge(
            "tokenmill_breakers", "Workers by the state of their circuit breaker", ["state"], registry=registry
        )
        self.slow_clients = Counter(
            "tokenmill_slow_clients", "Requests cancelled because the client did not read", registry=registry
        )
