"""Advice on the number of replicas and its reasons."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whorl.router.autoscaling_advice import AutoscalingConfig, PoolSnapshot, advise


def window(
    seconds: int,
    *,
    replicas: int = 2,
    queue: int = 0,
    running: int = 8,
    arrivals: float = 2.0,
    done: float = 2.0,
    good: float = 1.0,
) -> list[PoolSnapshot]:
    return [
        PoolSnapshot(
            float(t), replicas, queue, running, int(arrivals * t), int(done * t), int(done * t * good)
        )
        for t in range(seconds + 1)
    ]


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
    assert advise(window(599, replicas=4)).change == 0
    advice = advise(window(600, replicas=4))
    assert advice.change == -1 and str(advice).startswith("1 fewer: no queue for 600 s")
    assert advise(window(600, replicas=4, running=100)).change == 0, "100 > 0.8 x 32 x 3"
    assert advise(window(600, replicas=4, good=0.9)).change == 0
    assert advise(window(600, replicas=1)).change == 0
    assert advise(window(600, replicas=3), AutoscalingConfig(min_replicas=3)).change == 0


def test_advise_restores_min_replicas() -> None:
    assert advise(window(60, replicas=1), AutoscalingConfig(min_replicas=3)).change == 2


@given(
    st.lists(st.tuples(*[st.integers(0, 40)] * 5), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 4),
    st.integers(4, 12),
)
def test_advice_is_bounded_and_has_reasons(
    seen: list[tuple[int, ...]], step: int, fewest: int, most: int
) -> None:
    arrived = finished = good = 0
    snapshots = []
    for i, (queue, running, a, f, g) in enumerate(seen):
        arrived, finished, good = arrived + a, finished + f, good + min(f, g)
        snapshots.append(
            PoolSnapshot(float(i * step), 1 + running % 12, queue, running, arrived, finished, good)
        )
    want = AutoscalingConfig(min_replicas=fewest, max_replicas=most)
    advice, now = advise(snapshots, want), snapshots[-1].replicas
    assert advice.replicas == now + advice.change
    assert advice.reasons and all(advice.reasons)
    assert advice.change <= max(now, fewest) and advice.change >= -1
    if advice.change:
        assert fewest <= advice.replicas and (advice.replicas <= most or advice.change < 0)
