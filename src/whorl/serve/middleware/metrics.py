"""Prometheus metrics of a server: latencies of sequences, goodput, counters of the engine.

    TTFT     from the arrival of the request to its first token, queue included       histogram
    TPOT     (last token - first token) / (tokens - 1)                                histogram
    e2e      from the arrival to the last token                                       histogram
    goodput  sequences within both SLOs: TTFT <= --slo-ttft and TPOT <= --slo-tpot    counter

Goodput is the throughput that meets the SLOs (DistServe, arXiv:2401.09670). `rate(within_slo[1m])` is goodput;
`rate(within_slo[1m]) / rate(finished[1m])` is SLO attainment. An aborted sequence counts only as aborted.

Times are taken in the engine thread at the end of the step that generated the token. Network time is not included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whorl.http.loop_watchdog import LOOP_GAUGES, LoopWatchdog
from whorl.serve.worker.worker import EngineWorker, Stream

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 30, 60)
TPOT_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1)
RECENT_SEQUENCES = 512  # sequences that the percentiles cover
LOOP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 120, 300)


class ServerMetrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, slo_ttft: float, slo_tpot: float) -> None:
        self.slo_ttft, self.slo_tpot = slo_ttft, slo_tpot
        self.registry = r = CollectorRegistry()
        self.engine_stats: dict[str, float] = {}  # counters of the engine at the last request of /metrics
        self.worker: EngineWorker | None = None
        self.watchdog: LoopWatchdog | None = None
        self.ttft = Histogram(
            "whorl_ttft_seconds", "Seconds to the first token", registry=r, buckets=TTFT_BUCKETS
        )
        self.tpot = Histogram(
            "whorl_tpot_seconds", "Seconds per token after the first", registry=r, buckets=TPOT_BUCKETS
        )
        self.e2e = Histogram(
            "whorl_e2e_seconds", "Seconds to the last token", registry=r, buckets=E2E_BUCKETS
        )
        self.finished = Counter(
            "whorl_sequences_finished", "Finished sequences by reason", ["reason"], registry=r
        )
        self.within_slo = Counter(
            "whorl_sequences_within_slo", "Finished sequences within both SLOs", registry=r
        )
        self.prompt_tokens = Counter("whorl_prompt_tokens", "Prompt tokens", registry=r)
        self.cached_tokens = Counter(
            "whorl_prompt_tokens_cached", "Prompt tokens found in the prefix cache", registry=r
        )
        self.generated_tokens = Counter("whorl_generated_tokens", "Generated tokens", registry=r)
        self.http_requests = Counter("whorl_http_requests", "HTTP responses", ["path", "status"], registry=r)
        self.loop_delay = Histogram(
            "whorl_event_loop_delay_seconds", "Delay of a heartbeat", registry=r, buckets=LOOP_BUCKETS
        )
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT_SEQUENCES)  # ttft, tpot, e2e
        for name in ("stop", "length", "abort"):
            self.finished.labels(name)  # creates the series at 0: the rate of a missing series is not 0
        r.register(_LiveGauges(self))

    def observe_finished(self, stream: Stream) -> None:
        """Record a sequence that ended for any reason."""
        self.finished.labels(stream.finish or "abort").inc()
        self.generated_tokens.inc(stream.n_tokens)
        if not stream.first_token_time:
            return
        ttft = stream.first_token_time - stream.submit_time
        tpot = (
            (stream.last_token_time - stream.first_token_time) / (stream.n_tokens - 1)
            if stream.n_tokens > 1
            else 0.0
        )
        self.prompt_tokens.inc(len(stream.request.ids))
        self.cached_tokens.inc(stream.cached_tokens)
        self.ttft.observe(ttft)
        if stream.n_tokens > 1:
            self._recent.append((ttft, tpot, stream.last_token_time - stream.submit_time))
        if stream.finish in ("stop", "length"):
            self.e2e.observe(stream.last_token_time - stream.submit_time)
            if stream.n_tokens > 1:
                self.tpot.observe(tpot)
            if ttft <= self.slo_ttft and tpot <= self.slo_tpot:
                self.within_slo.inc()

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Latencies of recent sequences in seconds, oldest first, for the engine page."""
        columns = list(zip(*self._recent, strict=True)) or [(), (), ()]
        return {
            name: [round(x, 6) for x in column]
            for name, column in zip(("ttft", "tpot", "e2e"), columns, strict=True)
        }

    @property
    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LiveGauges(Collector):
    """Gauges that are read when Prometheus collects them."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        worker = self.metrics.worker
        if worker is not None:
            yield GaugeMetricFamily(
                "whorl_sequences_waiting", "Sequences without a first token", value=worker.waiting
            )
            yield GaugeMetricFamily(
                "whorl_sequences_running", "Sequences with a first token", value=worker.running
            )
            yield GaugeMetricFamily("whorl_up", "1 if the engine runs", value=float(worker.error is None))
        if (watchdog := self.metrics.watchdog) is not None:
            for name, value in (("delay", watchdog.longest_delay), ("own", watchdog.longest_own)):
                yield GaugeMetricFamily(
                    f"whorl_event_loop_longest_{name}_seconds", LOOP_GAUGES[name], value=value
                )
        for name, value in sorted(self.metrics.engine_stats.items()):
            yield GaugeMetricFamily(
                f"whorl_engine_{name}", f"The engine's {name.replace('_', ' ')}", value=value
            )
