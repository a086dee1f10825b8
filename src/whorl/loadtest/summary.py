"""What a load test found, as figures: a pure function of its records.

    TTFT   first token - scheduled            TPOT   (last token - first) / (tokens - 1)
    ITL    gaps between events of one stream  E2E    end - scheduled            lag   sent - scheduled

Throughput is what was finished over the time from the beginning to the last end. Goodput counts only requests that kept the
promise, all of it: an average that is met by half of the users serves half of the users (DistServe, arXiv:2401.09670). A
request that failed kept nothing; one with a single token has no TPOT and can only break the promise of its TTFT. Cost per
million tokens is the machine's hourly price over what it wrote in this time: at the load of the test, not at the best one.

Percentiles interpolate between neighbours. Of 100 requests the 99th percentile is all but the slowest one: the page says
how many there were.
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
    """A distribution in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class LatencySLO:
    """What users were promised, in seconds: to the first token, and a token after it. None: nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request was served as promised."""
        if record.error is not None or record.ttft is None:
            return False
        if self.ttft is not None and record.ttft > self.ttft:
            return False
        return self.tpot is None or record.tpot is None or record.tpot <= self.tpot


@dataclass(frozen=True)
class LoadSummary:
    """One load's figures. Rates are a second; times in seconds; spreads None where nothing was measured.

    offered: requests a second that were to arrive (None in a closed loop). good: share of all requests that kept the
    promise. cost: of a million output tokens, and of a million of all.
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
        """All of it as JSON's types."""
        return asdict(self)


def latency_stats(values: Sequence[float]) -> LatencyStats | None:
    """Mean, percentiles and the largest; None of nothing."""
    if not values:
        return None
    array = np.asarray(values, float)
    p50, p90, p95, p99 = (float(x) for x in np.percentile(array, PERCENTILES))
    return LatencyStats(float(array.mean()), p50, p90, p95, p99, float(array.max()))


def summarise(
    records: Sequence[RequestRecord],
    *,
    offered_rate: float | None = None,
    concurrency: int | None = None,
    slo: LatencySLO | None = None,
    cost_per_hour: float | None = None,
) -> LoadSummary:
    """The figures of one load. Args as in `Summary`; `cost_per_hour` in any currency."""
    ended = [r for r in records if r.error is None]
    seconds = max((r.finished for r in records), default=0.0)
    over = seconds or float("inf")
    ins, outs = sum(r.prompt_tokens for r in ended), sum(r.output_tokens for r in ended)
    kept = None if slo is None else sum(slo.is_met(r) for r in records)
    spent = None if cost_per_hour is None else cost_per_hour * seconds / 3600
    return LoadSummary(
        requests=len(records),
        finished=len(ended),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        seconds=seconds,
        offered_rate=offered_rate,
        concurrency=concurrency,
        request_rate=len(ended) / over,
        input_rate=ins / over,
        output_rate=outs / over,
        goodput=None if kept is None else kept / over,
        slo_attainment=None if kept is None or not records else kept / len(records),
        prompt_tokens=ins,
        output_tokens=outs,
        ttft=latency_stats([r.ttft for r in ended if r.ttft is not None]),
        tpot=latency_stats([r.tpot for r in ended if r.tpot is not None]),
        itl=latency_stats([gap for r in ended for gap in r.gaps]),
        e2e=latency_stats([r.latency for r in ended]),
        lag=latency_stats([r.lag for r in records]),
        output_cost=None if spent is None or not outs else 1e6 * spent / outs,
        total_cost=None if spent is None or not ins + outs else 1e6 * spent / (ins + outs),
    )


def client_lagging(summary: LoadSummary) -> bool:
    """Whether the client itself was so late that the figures are its own: a twentieth of the median TTFT, or 10 ms."""
    if summary.lag is None:
        return False
    return summary.lag.p99 > max(0.01, 0.05 * summary.ttft.p50 if summary.ttft else 0.0)
