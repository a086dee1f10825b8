"""What Prometheus is told: latencies as people feel them, and the engine's own counts.

    TTFT   arrival of the request to its first token, queue included                    histogram
    TPOT   (last token - first token) / (tokens - 1)                                    histogram
    e2e    arrival to the last token                                                    histogram
    goodput  sequences that kept both promises (TTFT <= --slo-ttft and TPOT <= --slo-tpot)   counter, beside all that ended

Goodput is what a service is worth: throughput that came in time (DistServe, arXiv:2401.09670). `rate(within_slo[1m])` is
goodput, and its quotient with `rate(finished[1m])` the share of promises kept. A sequence that was aborted kept none and
broke none: it counts as aborted.

Times are the engine thread's, taken at the end of the step that gave the token: what the network adds is the client's
to measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whorl.serve.worker.worker import EngineWorker, Stream

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 30, 60)
TPOT_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1)
RECENT_SEQUENCES = 512  # sequences that percentiles are taken over
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 120, 300)


class ServerMetrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, slo_ttft: float, slo_tpot: float) -> None:
        self.slo_ttft, self.slo_tpot = slo_ttft, slo_tpot
        self.registry = r = CollectorRegistry()
        self.engine_stats: dict[str, float] = {}  # the engine's, at the last look
        self.worker: EngineWorker | None = None
        self.ttft = Histogram(
            "whorl_ttft_seconds", "Seconds to the first token", registry=r, buckets=TTFT_BUCKETS
        )
        self.tpot = Histogram(
            "whorl_tpot_seconds", "Seconds a token after the first", registry=r, buckets=TPOT_BUCKETS
        )
        self.e2e = Histogram(
            "whorl_e2e_seconds", "Seconds to the last token", registry=r, buckets=E2E_BUCKETS
        )
        self.finished = Counter("whorl_sequences_finished", "Sequences that ended", ["reason"], registry=r)
        self.within_slo = Counter("whorl_sequences_within_slo", "Those that kept both promises", registry=r)
        self.prompt_tokens = Counter("whorl_prompt_tokens", "Tokens of prompts", registry=r)
        self.cached_tokens = Counter("whorl_prompt_tokens_cached", "Those found in the cache", registry=r)
        self.generated_tokens = Counter("whorl_generated_tokens", "Tokens written", registry=r)
        self.http_requests = Counter("whorl_http_requests", "Answers", ["path", "status"], registry=r)
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT_SEQUENCES)  # ttft, tpot, e2e
        for name in ("stop", "length", "abort"):
            self.finished.labels(name)  # a rate over a series that is not there yet is no zero
        r.register(_LiveGauges(self))

    def observe_finished(self, stream: Stream) -> None:
        """A sequence came to its end, whatever that was."""
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
        """Seconds of the last sequences, oldest first: what the engine's page draws."""
        columns = list(zip(*self._recent, strict=True)) or [(), (), ()]
        return {
            name: [round(x, 6) for x in column]
            for name, column in zip(("ttft", "tpot", "e2e"), columns, strict=True)
        }

    @property
    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class _LiveGauges(Collector):
    """What is read at the moment it is asked for."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        worker = self.metrics.worker
        if worker is not None:
            yield GaugeMetricFamily(
                "whorl_sequences_waiting", "Without a first token yet", value=worker.waiting
            )
            yield GaugeMetricFamily("whorl_sequences_running", "That have begun", value=worker.running)
            yield GaugeMetricFamily("whorl_up", "Whether the engine runs", value=float(worker.error is None))
        for name, value in sorted(self.metrics.engine_stats.items()):
            yield GaugeMetricFamily(
                f"whorl_engine_{name}", f"The engine's {name.replace('_', ' ')}", value=value
            )
