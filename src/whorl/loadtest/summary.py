"""Summary of a load: a pure function of its records.

    TTFT   first token - scheduled            TPOT   (last token - first) / (tokens - 1)
    ITL    gaps between events of one stream  E2E    end - scheduled            lag   sent - scheduled

Throughput is the finished work divided by the time from the start to the last end. Goodput counts only requests that meet
the whole SLO (DistServe, arXiv:2401.09670). A failed request does not meet it. A request with one token has no TPOT, so
only its TTFT is checked. Cost per million tokens is the machine's hourly price divided by the tokens of this load.

Percentiles are interpolated linearly. With 100 requests the 99th percentile is almost the maximum; the report shows the
number of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from whorl.loadtest.client import RequestRecord

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class LatencyStats:
    """Statistics of a latency in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class LatencySLO:
    """Latency objective in seconds: to the first token, per token after it. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request met the objective."""
        if record.error is not None or record.ttft is None:
            return False
        if self.ttft is not None and record.ttft > self.ttft:
            return False
        return self.tpot is None or record.tpot is None or record.tpot <= self.tpot


@dataclass(frozen=True)
class LoadSummary:
    """Results of one load. Rates are per second, times in seconds; statistics are None without measurements.

    offered_rate: scheduled requests per second (None in a closed loop). slo_attainment: share of requests within the SLO.
    output_cost, total_cost: per million output tokens and per million tokens.
    """

    requests: int
    finished: int
    errors: dict[str, int]
    seconds: float
    offered_rate: float | None
    concurrency: int | None
    request_rate: float
    input_rate: float
    output_rate: float
    goodput: float | None
    slo_attainment: float | None
    prompt_tokens: int
    output_tokens: int
    ttft: LatencyStats | None
    tpot: LatencyStats | None
    itl: LatencyStats | None
    e2e: LatencyStats | None
    lag: LatencyStats | None
    output_cost: float | None
    total_cost: float | None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return asdict(self)


def latency_stats(values: Sequence[float]) -> LatencyStats | None:
    """Return mean, percentiles and maximum; None for no values."""
    if not values:
        return None
    array = np.asarray(values, float)
    p50, p90, p95, p99 = (float(x) for x in np.percentile(array, PERCENTILES))
    return LatencyStats(float(array.mean()), p50, p90, p95, p99, float(array.max()))


def summarize(
    records: Sequence[RequestRecord],
    *,
    offered_rate: float | None = None,
    concurrency: int | None = None,
    slo: LatencySLO | None = None,
    cost_per_hour: float | None = None,
) -> LoadSummary:
    """Summarize one load. Arguments as in `LoadSummary`; `cost_per_hour` in any currency."""
    finished = [r for r in records if r.error is None]
    seconds = max((r.finished for r in records), default=0.0)
    duration = seconds or float("inf")
    ins, outs = sum(r.prompt_tokens for r in finished), sum(r.output_tokens for r in finished)
    n_within_slo = None if slo is None else sum(slo.is_met(r) for r in records)
    total = None if cost_per_hour is None else cost_per_hour * seconds / 3600
    return LoadSummary(
        requests=len(records),
        finished=len(finished),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        seconds=seconds,
        offered_rate=offered_rate,
        concurrency=concurrency,
        request_rate=len(finished) / duration,
        input_rate=ins / duration,
        output_rate=outs / duration,
        goodput=None if n_within_slo is None else n_within_slo / duration,
        slo_attainment=None if n_within_slo is None or not records else n_within_slo / len(records),
        prompt_tokens=ins,
        output_tokens=outs,
        ttft=latency_stats([r.ttft for r in finished if r.ttft is not None]),
        tpot=latency_stats([r.tpot for r in finished if r.tpot is not None]),
        itl=latency_stats([gap for r in finished for gap in r.gaps]),
        e2e=latency_stats([r.latency for r in finished]),
        lag=latency_stats([r.lag for r in records]),
        output_cost=None if total is None or not outs else 1e6 * total / outs,
        total_cost=None if total is None or not ins + outs else 1e6 * total / (ins + outs),
    )


def client_lagging(summary: LoadSummary) -> bool:
    """Return whether the 99th percentile of the lag exceeds 10 ms and a twentieth of the median TTFT."""
    if summary.lag is None:
        return False
    return summary.lag.p99 > max(0.01, 0.05 * summary.ttft.p50 if summary.ttft else 0.0)
