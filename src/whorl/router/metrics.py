"""Prometheus metrics of the router, per replica, and the check of the SLO.

The times are seen from the router's clients: to the first byte, between events, to the end. Metrics of a replica count
tokens and cache pages; these metrics count routing decisions, retries and rejections.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from whorl.http.loop_watchdog import LOOP_GAUGES, LoopWatchdog
from whorl.router.breaker import CircuitState
from whorl.router.replica_pool import ReplicaPool
from whorl.router.routing_policy import RoutingDecision

FIRST_BYTE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


@dataclass
class Timings:
    """Times of one request in seconds of the pool's clock. events: number of events of a stream."""

    start: float
    first_byte: float | None = None
    last_event: float | None = None
    events: int = 0

    def add_events(self, now: float, n: int) -> None:
        """Record `n` events at time `now`."""
        self.events, self.last_event = self.events + n, now

    @property
    def mean_event_gap(self) -> float | None:
        """Mean seconds between events."""
        if self.first_byte is None or self.last_event is None or self.events < 2:
            return None
        return (self.last_event - self.first_byte) / (self.events - 1)


@dataclass(frozen=True)
class SLO:
    """Service-level objective: seconds to the first byte, mean seconds between events. None: no limit."""

    first_byte: float | None = None
    mean_event_gap: float | None = None


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self, slo: SLO | None = None) -> None:
        self.slo = slo or SLO()
        self.registry = registry = CollectorRegistry()
        self.watchdog = LoopWatchdog()
        self._attempts = Counter(
            "whorl_router_attempts", "Attempts by replica and outcome", ["replica", "outcome"], registry=registry
        )  # fmt: skip
        self._decisions = Counter(
            "whorl_router_decisions",
            "Routing decisions by replica and reason",
            ["replica", "reason"],
            registry=registry,
        )
        self._retries = Counter("whorl_router_retries", "Retries by replica", ["replica"], registry=registry)
        self._rejected = Counter(
            "whorl_router_rejected", "Requests that no replica could take", registry=registry
        )
        self._blocks = Counter(
            "whorl_router_prompt_blocks",
            "Prompt blocks by cache state",
            ["replica", "cache"],
            registry=registry,
        )
        self._first_byte = Histogram(
            "whorl_router_first_byte_seconds", "Seconds to the first byte", ["replica"],
            buckets=FIRST_BYTE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._request_seconds = Histogram(
            "whorl_router_request_seconds", "Seconds to the end of the response", ["replica"],
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        gauges = {
            "running": "Requests in progress",
            "waiting": "Requests without a first byte",
            "healthy": "1 if health checks succeed",
            "draining": "1 if it gets no new requests",
            "circuit_open": "1 open, 0.5 half-open, 0 closed",
        }
        self._gauges = {
            name: Gauge(f"whorl_router_replica_{name}", text, ["replica"], registry=registry)
            for name, text in gauges.items()
        }
        self._longest_delay, self._longest_own = (
            Gauge(f"whorl_router_event_loop_longest_{name}_seconds", text, registry=registry)
            for name, text in LOOP_GAUGES.items()
        )
        self._goodput = Gauge(
            "whorl_router_goodput", "Share of finished requests within the SLO", registry=registry
        )

    def record_decision(self, decision: RoutingDecision, retry: bool) -> None:
        """Record that a request is sent to a replica."""
        self._decisions.labels(decision.replica, decision.reason).inc()
        self._blocks.labels(decision.replica, "cached").inc(decision.cached_blocks)
        self._blocks.labels(decision.replica, "new").inc(decision.blocks - decision.cached_blocks)
        if retry:
            self._retries.labels(decision.replica).inc()

    def record_attempt(self, replica: str, outcome: str, timings: Timings, now: float) -> None:
        """Record the end of an attempt."""
        self._attempts.labels(replica, outcome).inc()
        if timings.first_byte is not None:
            self._first_byte.labels(replica).observe(timings.first_byte - timings.start)
            self._request_seconds.labels(replica).observe(now - timings.start)

    def record_rejected(self) -> None:
        """Record a request that the router answered with 503."""
        self._rejected.inc()

    def meets_slo(self, timings: Timings) -> bool:
        """Return whether a successful request met the SLO."""
        if timings.first_byte is None:
            return False
        within = self.slo.first_byte is None or timings.first_byte - timings.start <= self.slo.first_byte
        gap = timings.mean_event_gap
        return within and (self.slo.mean_event_gap is None or gap is None or gap <= self.slo.mean_event_gap)

    def exposition(self, pool: ReplicaPool) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._longest_delay.set(self.watchdog.longest_delay)
        self._longest_own.set(self.watchdog.longest_own)
        circuit_values = {CircuitState.OPEN: 1.0, CircuitState.HALF_OPEN: 0.5, CircuitState.CLOSED: 0.0}
        for gauge in self._gauges.values():
            gauge.clear()
        for name, replica in pool.replicas.items():
            load = pool.policy.loads[name]
            values = {
                "running": load.running,
                "waiting": load.waiting,
                "healthy": replica.healthy,
                "draining": replica.draining,
                "circuit_open": circuit_values[pool.circuit_state(name)],
            }
            for key, value in values.items():
                self._gauges[key].labels(name).set(float(value))
        totals = pool.totals
        self._goodput.set(totals.within_slo / totals.finished if totals.finished else 1.0)
        return generate_latest(self.registry)
