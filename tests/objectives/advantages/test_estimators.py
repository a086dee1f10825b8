"""Estimators against plain sums, and the identities between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.objectives.advantages.estimators import (
    Trajectory,
    discounted_returns,
    gae,
    n_step_returns,
    td_lambda_returns,
    v_trace,
)

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31))


def steps(shape: tuple[int, int, int], ends: float = 0.25) -> Trajectory:
    """Return random steps whose `next_value` is the next value inside an episode."""
    length, batch, seed = shape
    g = torch.Generator().manual_seed(seed)
    value, beyond = (torch.randn(length, batch, generator=g, dtype=torch.float64) for _ in range(2))
    terminated = torch.rand(length, batch, generator=g) < ends
    truncated = (torch.rand(length, batch, generator=g) < ends) & ~terminated
    next_value = beyond.clone()
    next_value[:-1] = torch.where((terminated | truncated)[:-1], beyond[:-1], value[1:])
    reward = torch.randn(length, batch, generator=g, dtype=torch.float64)
    return Trajectory(reward, value, next_value, terminated, truncated)


def episode(s: Trajectory, t: int, b: int) -> list[int]:
    """Return the steps from t to the end of its episode, or of the data."""
    found = [t]
    while not s.episode_end[found[-1], b] and found[-1] + 1 < s.reward.shape[0]:
        found.append(found[-1] + 1)
    return found


def beyond(s: Trajectory, t: int, b: int) -> float:
    return 0.0 if s.terminated[t, b] else float(s.next_value[t, b])


@given(SHAPES, st.integers(1, 6), st.floats(0.5, 1))
@settings(max_examples=60, deadline=None)
def test_returns_match_definition(shape: tuple[int, int, int], n: int, discount: float) -> None:
    s = steps(shape)
    whole, some = discounted_returns(s, discount), n_step_returns(s, discount, n)
    for t in range(shape[0]):
        for b in range(shape[1]):
            path = episode(s, t, b)
            want = sum(discount**k * float(s.reward[u, b]) for k, u in enumerate(path))
            assert float(whole[t, b]) == pytest.approx(want + discount ** len(path) * beyond(s, path[-1], b))
            path = path[:n]
            want = sum(discount**k * float(s.reward[u, b]) for k, u in enumerate(path))
            assert float(some[t, b]) == pytest.approx(want + discount ** len(path) * beyond(s, path[-1], b))


@given(SHAPES, st.floats(0.5, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae_matches_weighted_sum_of_td_errors(
    shape: tuple[int, int, int], discount: float, lambda_: float
) -> None:
    s = steps(shape)
    found, errors = gae(s, discount, lambda_), s.td_error(discount)
    for t in range(shape[0]):
        for b in range(shape[1]):
            want = sum(
                (discount * lambda_) ** k * float(errors[u, b]) for k, u in enumerate(episode(s, t, b))
            )
            assert float(found[t, b]) == pytest.approx(want)


@given(SHAPES, st.floats(0.5, 1))
@settings(max_examples=60, deadline=None)
def test_estimators_agree_in_limit_cases(shape: tuple[int, int, int], discount: float) -> None:
    s = steps(shape)
    monte_carlo = discounted_returns(s, discount)
    assert torch.allclose(gae(s, discount, 1.0), monte_carlo - s.value)
    assert torch.allclose(gae(s, discount, 0.0), s.td_error(discount))
    assert torch.allclose(td_lambda_returns(s, discount, 1.0), monte_carlo)
    assert torch.allclose(td_lambda_returns(s, discount, 0.0), n_step_returns(s, discount, 1))
    assert torch.allclose(n_step_returns(s, discount, shape[0]), monte_carlo)
    on_policy = v_trace(s, torch.zeros_like(s.reward), discount)
    assert torch.allclose(on_policy.target, monte_carlo)
    assert torch.allclose(on_policy.advantage, monte_carlo - s.value)
    for lambda_ in (0.0, 0.7):
        found = v_trace(s, torch.zeros_like(s.reward), discount, lambda_=lambda_)
        assert torch.allclose(found.target, td_lambda_returns(s, discount, lambda_))


@given(SHAPES, st.floats(0.5, 1), st.floats(0.3, 2), st.floats(0.3, 2))
@settings(max_examples=60, deadline=None)
def test_v_trace_matches_equation_1(
    shape: tuple[int, int, int], discount: float, rho: float, c: float
) -> None:
    s = steps(shape)
    log_ratio = torch.randn(
        s.reward.shape, generator=torch.Generator().manual_seed(shape[2]), dtype=torch.float64
    )
    found = v_trace(s, log_ratio, discount, rho=rho, c=c)
    ratio = log_ratio.exp()
    for t in range(shape[0]):
        for b in range(shape[1]):
            want, product = float(s.value[t, b]), 1.0
            for k, u in enumerate(episode(s, t, b)):
                want += (
                    discount**k * product * min(rho, float(ratio[u, b])) * float(s.td_error(discount)[u, b])
                )
                product *= min(c, float(ratio[u, b]))
            assert float(found.target[t, b]) == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_returns_bootstrap_after_truncation_only() -> None:
    one = torch.ones(2, 1)
    yes, no = torch.tensor([[True], [False]]), torch.zeros(2, 1, dtype=torch.bool)
    ended = Trajectory(one, 0 * one, 10 * one, yes, no)
    cut = Trajectory(one, 0 * one, 10 * one, no, yes)
    assert discounted_returns(ended, 0.5).flatten().tolist() == [1, 6]
    assert discounted_returns(cut, 0.5).flatten().tolist() == [6, 6]


def test_n_step_returns_reject_zero_steps() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        n_step_returns(steps((3, 1, 0)), 0.9, 0)
