"""Group advantages against loops over the definition, and groups with equal rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError, DataError
from whorl.objectives.advantages.group_advantages import (
    Baseline,
    StdEstimator,
    group_advantages,
    update_running_mean,
)


def by_loops(
    reward: list[float], group: list[int], baseline: Baseline, deviation: StdEstimator, eps: float
) -> list[float]:
    out = []
    for i, r in enumerate(reward):
        own = [x for x, g in zip(reward, group, strict=True) if g == group[i]]
        compared = own if baseline in ("group", "leave_one_out") else reward
        mean, n = sum(compared) / len(compared), len(compared) - (deviation == "unbiased")
        others = [x for j, x in enumerate(reward) if j != i and group[j] == group[i]]
        left_out = sum(others) / len(others) if others else r
        a = r - {"none": 0.0, "batch": mean, "group": mean, "leave_one_out": left_out}[baseline]
        if len(set(compared)) == 1:
            a = a if baseline == "none" else 0.0
        elif deviation != "none":
            a /= math.sqrt(sum((x - mean) ** 2 for x in compared) / n) + eps
        out.append(a)
    return out


@given(
    answers=st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 3)), min_size=1, max_size=16),
    baseline=st.sampled_from(["none", "batch", "group", "leave_one_out"]),
    deviation=st.sampled_from(["none", "biased", "unbiased"]),
    eps=st.sampled_from([0.0, 1e-4]),
)
def test_group_advantages_match_definition(answers: Any, baseline: Any, deviation: Any, eps: float) -> None:
    reward, group = [x / 3 for x, _ in answers], [g for _, g in answers]
    options: dict[str, Any] = {"baseline": baseline, "scale_rewards": deviation, "eps": eps}
    found = group_advantages(torch.tensor(reward, dtype=torch.float64), torch.tensor(group), **options)
    wanted = by_loops(reward, group, baseline, deviation, eps)
    assert found.advantage.tolist() == pytest.approx(wanted, abs=1e-9)
    even = [len({r for r, h in zip(reward, group, strict=True) if h == g}) == 1 for g in group]
    assert found.zero_std.tolist() == even
    assert found.n_groups == len(set(group))
    assert found.n_zero_std == len({g for g, e in zip(group, even, strict=True) if e})


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("deviation", ["none", "biased", "unbiased"])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_group_advantages_are_zero_for_equal_rewards(baseline: Any, deviation: Any, n: int) -> None:
    # The mean of three 0.1 is not exact: rounding over rounding would be an advantage of 1.
    reward, group = torch.full((n,), 0.1), torch.zeros(n, dtype=torch.int64)
    found = group_advantages(reward, group, baseline=baseline, scale_rewards=deviation, eps=0.0)
    assert not found.advantage.any() and found.n_zero_std == found.n_groups == 1


def test_group_advantages_of_empty_batch() -> None:
    for baseline in ("none", "batch", "group", "leave_one_out"):
        empty = torch.zeros(0)
        found = group_advantages(empty, empty.long(), baseline=baseline, scale_rewards="unbiased")  # type: ignore[arg-type]
        assert found.advantage.shape == (0,) and (found.n_groups, found.n_zero_std) == (0, 0)


@pytest.mark.parametrize("wrong", [{"baseline": "critic"}])
def test_group_advantages_reject_critic_baseline(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), **wrong)


def test_group_advantages_reject_invalid_rewards() -> None:
    group = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(DataError, match="reward 1 is nan"):
        group_advantages(torch.tensor([0.0, math.nan, 1.0]), group)
    with pytest.raises(ConfigError):
        group_advantages(torch.zeros(2), group)


# Two groups, (1, 0) and (3, 0): means 0.5 and 1.5, batch mean 1, squared deviations 0 + 1 + 4 + 1 = 6.
REWARD, GROUP = torch.tensor([1.0, 0.0, 3.0, 0.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
CENTRED = [0.5, -0.5, 1.5, -1.5]  # squares sum to 5


@pytest.mark.parametrize(
    ("estimator", "over", "scale"),
    [
        ("unbiased", "batch", math.sqrt(6 / 3)),
        ("biased", "batch", math.sqrt(6 / 4)),
        ("unbiased", "advantages", math.sqrt(5 / 3)),
        ("biased", "advantages", math.sqrt(5 / 4)),
        ("none", "batch", 1.0),
    ],
)
def test_group_mean_with_batch_deviation_by_hand(estimator: Any, over: Any, scale: float) -> None:
    found = group_advantages(REWARD, GROUP, scale_rewards=estimator, scale_over=over, eps=0.0)
    assert found.advantage.tolist() == pytest.approx([a / scale for a in CENTRED], abs=1e-12)


@pytest.mark.parametrize("over", ["batch", "advantages"])
def test_batch_deviation_keeps_equal_groups_at_zero(over: Any) -> None:
    reward = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 0.5])
    options: dict[str, Any] = {"scale_rewards": "unbiased", "scale_over": over, "eps": 0.0}
    found = group_advantages(reward, torch.arange(6) // 3, **options)
    assert not found.advantage[:3].any() and found.advantage[3] > 0 > found.advantage[4]
    equal = group_advantages(torch.full((6,), 0.1), torch.arange(6) // 3, **options)
    assert not equal.advantage.any() and equal.n_zero_std == 2


def test_running_baseline_by_hand() -> None:
    first = group_advantages(REWARD, GROUP, baseline="running")
    assert first.advantage.tolist() == [0.0, -1.0, 2.0, -1.0]  # no earlier batch: this batch's mean
    mean = update_running_mean(None, REWARD, 0.75)
    assert mean == 1.0
    mean = update_running_mean(mean, torch.tensor([3.0, 2.0]), 0.75)
    assert mean == pytest.approx(0.75 * 1.0 + 0.25 * 2.5)  # 1.375
    equal = torch.ones(2)  # equal rewards differ from earlier ones, so their advantages are not 0
    later = group_advantages(equal, torch.zeros(2, dtype=torch.int64), baseline="running", running_mean=mean)
    assert later.advantage.tolist() == pytest.approx([-0.375, -0.375])
    scaled = group_advantages(
        REWARD, GROUP, baseline="running", running_mean=0.5, scale_rewards="unbiased", eps=0.0
    )
    wanted = [x / math.sqrt(2) for x in (0.5, -0.5, 2.5, -0.5)]
    assert scaled.advantage.tolist() == pytest.approx(wanted, abs=1e-12)
