"""Advice on the number of replicas and its reasons."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from whorl.router.autoscaling_advice import AutoscalingConfig, PoolSnapshot, advise


def window(seconds: int, queue: int = 0, running: int = 8, replicas: int = 2, **rates: float) -> list[Any]:
    """A snapshot per second. rates: arrivals and finished requests per second, and the good share of the latter."""
    rates = {"arrivals": 2.0, "done": 2.0, "good": 1.0} | rates
    per_second = rates["arrivals"], rates["done"], rates["done"] * rates["good"]
    totals = [[int(rate * t) for rate in per_second] for t in range(seconds + 1)]
    return [PoolSnapshot(float(t), replicas, queue, running, *total) for t, total in enumerate(totals)]


def test_advise_scales_up_for_persistent_queue() -> None:
    # 3 arrivals/s plus a queue of 14 in 60 s; two replicas finish 1/s each; target utilization 0.8.
    advice = advise(window(60, queue=14, arrivals=3.0, done=2.0, good=0.71))
    assert advice.replicas == 4 and advice.change == 2
    assert str(advice).startswith("2 more: queue of 14 for 60 s, goodput 0.71 < 0.95")
    assert "1/s per replica" in str(advice)
    wide = advise(window(60, queue=400, arrivals=40.0, done=2.0))
    assert wide.change == 2 and "59 required, 4 allowed at once" in str(wide)


def test_advise_ignores_short_queue() -> None:
    seen = window(60)
    seen[30] = PoolSnapshot(30.0, 2, 50, 8, 60, 60, 60)
    assert advise(seen).change == 0


def test_advise_waits_for_enough_history() -> None:
    assert "observed for 10 s of 60" in str(advise(window(10, queue=50)))
    assert advise([]).change == 0


def test_advise_keeps_replicas_for_slow_requests() -> None:
    advice = advise(window(60, good=0.5))
    assert advice.change == 0 and "slow without queueing" in str(advice)


def test_advise_adds_one_when_capacity_is_unknown() -> None:
    advice = advise(window(60, queue=9, done=0.0))
    assert advice.change == 1 and "unknown" in str(advice)


def test_advise_scales_down_one_after_long_idle() -> None:
    advice = advise(window(600, replicas=4))
    assert advice.change == -1 and str(advice).startswith("1 fewer: no queue for 600 s")
    busy = window(600, replicas=4, running=100)  # 100 > 0.8 x 32 x 3
    slow, short, single = window(600, replicas=4, good=0.9), window(599, replicas=4), window(600, replicas=1)
    assert [advise(kept).change for kept in (busy, slow, short, single)] == [0, 0, 0, 0]
    assert advise(window(600, replicas=3), AutoscalingConfig(min_replicas=3)).change == 0


def test_advise_restores_min_replicas() -> None:
    assert advise(window(60, replicas=1), AutoscalingConfig(min_replicas=3)).change == 2


counts = st.lists(st.tuples(*[st.integers(0, 40)] * 5), min_size=1, max_size=30)


@given(counts, st.integers(1, 20), st.integers(0, 4), st.integers(4, 12))
def test_advice_is_bounded_and_has_reasons(counts: Any, step: int, fewest: int, most: int) -> None:
    arrived = finished = good = 0
    snapshots = []
    for i, (queue, running, a, f, g) in enumerate(counts):
        arrived, finished, good = arrived + a, finished + f, good + min(f, g)
        now = 1 + running % 12
        snapshots.append(PoolSnapshot(float(i * step), now, queue, running, arrived, finished, good))
    advice = advise(snapshots, AutoscalingConfig(min_replicas=fewest, max_replicas=most))
    assert advice.replicas == now + advice.change
    assert advice.reasons and all(advice.reasons)
    assert -1 <= advice.change <= max(now, fewest)
    if advice.change:
        assert fewest <= advice.replicas and (advice.replicas <= most or advice.change < 0)
