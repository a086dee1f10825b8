"""How many replicas there should be, and the reasons given."""

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


def test_a_standing_queue_asks_for_as_many_as_work_it_off() -> None:
    # 3.4 a second arrive and 14 wait, to be done in 60 s; each of the two does one a second, to be filled to 0.8.
    advice = advise(window(60, queue=14, arrivals=3.0, done=2.0, good=0.71))
    assert advice.replicas == 4 and advice.change == 2
    assert str(advice).startswith("2 more: queue of 14 for 60 s, goodput 0.71 < 0.95")
    assert "1/s per replica" in str(advice)
    wide = advise(window(60, queue=400, arrivals=40.0, done=2.0))
    assert wide.change == 2 and "59 required, 4 allowed at once" in str(wide)


def test_a_flash_of_a_queue_asks_for_nothing() -> None:
    seen = window(60)
    seen[30] = PoolSnapshot(30.0, 2, 50, 8, 60, 60, 60)
    assert advise(seen).change == 0


def test_a_short_look_advises_nothing() -> None:
    assert "observed for 10 s of 60" in str(advise(window(10, queue=50)))
    assert advise([]).change == 0


def test_slow_requests_without_a_queue_are_not_mended_by_more_replicas() -> None:
    advice = advise(window(60, good=0.5))
    assert advice.change == 0 and "slow without queueing" in str(advice)


def test_nothing_finished_is_said_and_one_more_is_tried() -> None:
    advice = advise(window(60, queue=9, done=0.0))
    assert advice.change == 1 and "unknown" in str(advice)


def test_down_is_slow_and_one_at_a_time_and_only_where_one_fewer_holds_the_load() -> None:
    assert advise(window(599, replicas=4)).change == 0
    advice = advise(window(600, replicas=4))
    assert advice.change == -1 and str(advice).startswith("1 fewer: no queue for 600 s")
    assert advise(window(600, replicas=4, running=100)).change == 0, "100 > 0.8 x 32 x 3"
    assert advise(window(600, replicas=4, good=0.9)).change == 0
    assert advise(window(600, replicas=1)).change == 0
    assert advise(window(600, replicas=3), AutoscalingConfig(min_replicas=3)).change == 0


def test_too_few_serve() -> None:
    assert advise(window(60, replicas=1), AutoscalingConfig(min_replicas=3)).change == 2


@given(
    st.lists(st.tuples(*[st.integers(0, 40)] * 5), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 4),
    st.integers(4, 12),
)
def test_advice_stays_within_its_bounds_and_always_says_why(
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
