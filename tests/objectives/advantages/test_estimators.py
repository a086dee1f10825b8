"""Estimators against plain sums, and the identities between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.nn.checks import randn

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


def episodes(s: Trajectory) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield each (t, b) with the steps from t to the end of its episode, or of the data."""
    length, batch = s.reward.shape
    for t, b in itertools.product(range(length), range(batch)):
        ends = [u for u in range(t, length) if s.episode_end[u, b]]
        yield (t, b), list(range(t, (ends[0] if ends else length - 1) + 1))


@given(SHAPES, st.integers(1, 6), st.floats(0.5, 1))
def test_returns_match_definition(shape: tuple[int, int, int], n: int, discount: float) -> None:
    s = steps(shape)
    whole, some = discounted_returns(s, discount), n_step_returns(s, discount, n)
    for (t, b), path in episodes(s):
        for found, part in ((whole, path), (some, path[:n])):
            beyond = 0.0 if s.terminated[part[-1], b] else float(s.next_value[part[-1], b])
            want = sum(discount**k * float(s.reward[u, b]) for k, u in enumerate(part))
            assert float(found[t, b]) == pytest.approx(want + discount ** len(part) * beyond)


@given(SHAPES, st.floats(0.5, 1), st.floats(0, 1))
def test_gae_matches_weighted_sum_of_td_errors(shape: Any, discount: float, lambda_: float) -> None:
    s = steps(shape)
    found, errors = gae(s, discount, lambda_), s.td_error(discount)
    for (t, b), path in episodes(s):
        want = sum((discount * lambda_) ** k * float(errors[u, b]) for k, u in enumerate(path))
        assert float(found[t, b]) == pytest.approx(want)


@given(SHAPES, st.floats(0.5, 1))
def test_estimators_agree_in_limit_cases(shape: tuple[int, int, int], discount: float) -> None:
    s = steps(shape)
    monte_carlo = discounted_returns(s, discount)
    assert torch.allclose(td_lambda_returns(s, discount, 1.0), monte_carlo)
    assert torch.allclose(td_lambda_returns(s, discount, 0.0), n_step_returns(s, discount, 1))
    on_policy = v_trace(s, torch.zeros_like(s.reward), discount)
    assert torch.allclose(on_policy.target, monte_carlo)
    assert torch.allclose(on_policy.advantage, monte_carlo - s.value)
    for lambda_ in (0.0, 0.7):
        found = v_trace(s, torch.zeros_like(s.reward), discount, lambda_=lambda_)
        assert torch.allclose(found.target, td_lambda_returns(s, discount, lambda_))


@given(SHAPES, st.floats(0.5, 1), st.floats(0.3, 2), st.floats(0.3, 2))
def test_v_trace_matches_equation_1(shape: Any, discount: float, rho: float, c: float) -> None:
    s = steps(shape)
    log_ratio = randn(*s.reward.shape, seed=shape[2], dtype=torch.float64)
    found, errors = v_trace(s, log_ratio, discount, rho=rho, c=c).target, s.td_error(discount)
    for (t, b), path in episodes(s):
        want, product = float(s.value[t, b]), 1.0
        for k, u in enumerate(path):
            ratio = math.exp(float(log_ratio[u, b]))
            want += discount**k * product * min(rho, ratio) * float(errors[u, b])
            product *= min(c, ratio)
        assert float(found[t, b]) == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_n_step_returns_reject_zero_steps() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        n_step_returns(steps((3, 1, 0)), 0.9, 0)
