"""What the router counts: per replica, in Prometheus' form, and whether a request met its objective.

The times are those that a client of the router sees: to the first byte of an answer, between events, to the end. A replica's
own metrics know tokens and pages; these know the way there, the retries and what was refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from whorl.router.breaker import Circuit
from whorl.router.replica_pool import Fleet
from whorl.router.routing_policy import Choice

FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
WHOLE_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


@dataclass
class Timings:
    """Of one request, seconds of the fleet's clock. events: of a stream; last: when the last came."""

    began: float
    first: float | None = None
    last: float | None = None
    events: int = 0

    def event(self, now: float, n: int) -> None:
        """`n` events came at `now`."""
        self.events, self.last = self.events + n, now

    @property
    def gap(self) -> float | None:
        """Mean time between events."""
        if self.first is None or self.last is None or self.events < 2:
            return None
        return (self.last - self.first) / (self.events - 1)


@dataclass(frozen=True)
class Promise:
    """What a good request keeps to: seconds to the first byte, mean seconds between events. None: no such promise."""

    first: float | None = None
    gap: float | None = None


class Tolls:
    """The counters of one router."""

    def __init__(self, promise: Promise | None = None) -> None:
        self.promise = promise or Promise()
        self.registry = registry = CollectorRegistry()
        self._attempts = Counter(
            "whorl_router_attempts", "Requests sent to a replica, by how it ended", ["replica", "outcome"], registry=registry
        )  # fmt: skip
        self._choices = Counter(
            "whorl_router_choices", "Why a replica was chosen", ["replica", "why"], registry=registry
        )
        self._retries = Counter("whorl_router_retries", "Second attempts", ["replica"], registry=registry)
        self._refused = Counter("whorl_router_refused", "Requests no replica could take", registry=registry)
        self._blocks = Counter(
            "whorl_router_prompt_blocks", "Blocks of prompts sent", ["replica", "expected"], registry=registry
        )
        self._first = Histogram(
            "whorl_router_first_byte_seconds", "To the first byte of an answer", ["replica"],
            buckets=FIRST_BUCKETS, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "whorl_router_request_seconds", "To the end of an answer", ["replica"], buckets=WHOLE_BUCKETS, registry=registry
        )  # fmt: skip
        gauges = {
            "running": "Requests under way",
            "waiting": "Requests without a first byte",
            "healthy": "1 if it answers /health",
            "draining": "1 if it takes no new requests",
            "circuit_open": "1 open, 0.5 half-open, 0 closed",
        }
        self._gauges = {
            name: Gauge(f"whorl_router_replica_{name}", text, ["replica"], registry=registry)
            for name, text in gauges.items()
        }
        self._goodput = Gauge(
            "whorl_router_goodput", "Share of finished requests within the promise", registry=registry
        )

    def chosen(self, choice: Choice, retry: bool) -> None:
        """A request is sent."""
        self._choices.labels(choice.replica, choice.why).inc()
        self._blocks.labels(choice.replica, "cached").inc(choice.hit)
        self._blocks.labels(choice.replica, "new").inc(choice.blocks - choice.hit)
        if retry:
            self._retries.labels(choice.replica).inc()

    def attempt(self, replica: str, outcome: str, timings: Timings, now: float) -> None:
        """An attempt ended."""
        self._attempts.labels(replica, outcome).inc()
        if timings.first is not None:
            self._first.labels(replica).observe(timings.first - timings.began)
            self._whole.labels(replica).observe(now - timings.began)

    def refused(self) -> None:
        """A request was answered 503 here."""
        self._refused.inc()

    def meets(self, timings: Timings) -> bool:
        """Whether a request that was answered well kept to the promise."""
        if timings.first is None:
            return False
        within = self.promise.first is None or timings.first - timings.began <= self.promise.first
        gap = timings.gap
        return within and (self.promise.gap is None or gap is None or gap <= self.promise.gap)

    def exposition(self, fleet: Fleet) -> bytes:
        """All of it, as /metrics answers."""
        worth = {Circuit.OPEN: 1.0, Circuit.HALF_OPEN: 0.5, Circuit.CLOSED: 0.0}
        for gauge in self._gauges.values():
            gauge.clear()
        for name, replica in fleet.replicas.items():
            load = fleet.policy.loads[name]
            values = {
                "running": load.running,
                "waiting": load.waiting,
                "healthy": replica.healthy,
                "draining": replica.draining,
                "circuit_open": worth[fleet.circuit(name)],
            }
            for key, value in values.items():
                self._gauges[key].labels(name).set(float(value))
        tally = fleet.tally
        self._goodput.set(tally.good / tally.finished if tally.finished else 1.0)
        return generate_latest(self.registry)
