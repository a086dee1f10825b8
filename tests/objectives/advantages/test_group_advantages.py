"""Group advantages against loops over the definition, and groups with equal rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError, DataError
from whorl.objectives.advantages.group_advantages import Baseline, StdEstimator, group_advantages


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


@settings(max_examples=150, deadline=None)
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
