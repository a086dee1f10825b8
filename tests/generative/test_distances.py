"""Distances of samples against closed forms and enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor

from whorl.generative import distances
from whorl.generative.distances import frechet, mmd, sinkhorn, sliced_wasserstein, wasserstein
from whorl.generative.measures import DISTANCES


def normal(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DISTANCES)
@given(seed=st.integers(0, 1000))
def test_distance_is_symmetric_and_grows_with_a_shift(name: str, seed: int) -> None:
    distance, x, y = DISTANCES[name], normal(40, 3, seed), normal(40, 3, seed + 1)
    near, far = distance(x, y + 1), distance(x, y + 3)
    assert far > near
    if name != "MMD":  # its kernel follows the second set
        assert distance(y + 1, x) == pytest.approx(near, rel=1e-3)
        assert distance(x, x) == pytest.approx(0, abs=1e-5)


def test_wasserstein_equals_enumeration_and_shift() -> None:
    x, y = normal(6, 2), normal(6, 2, 1)
    best = min(
        float((x - y[list(order)]).square().sum(1).mean()) for order in itertools.permutations(range(6))
    )
    assert wasserstein(x, y) == pytest.approx(math.sqrt(best), rel=1e-6)
    assert wasserstein(x, x + torch.tensor([3.0, 4.0])) == pytest.approx(5, rel=1e-5)


def test_sliced_distance_of_a_shift_is_its_share() -> None:
    """A direction sees the shift's projection, whose mean square is |shift|^2 / d."""
    x = normal(200, 2)
    assert sliced_wasserstein(x, x + torch.tensor([3.0, 4.0])) == pytest.approx(5 / math.sqrt(2), rel=0.1)
    line = x[:, :1]
    assert sliced_wasserstein(line, line + 2) == pytest.approx(2, rel=1e-5)


def test_sinkhorn_becomes_exact_as_its_penalty_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normal(50, 2), normal(50, 2, 1) + 1
    exact, errors = wasserstein(x, y), []
    monkeypatch.setattr(distances, "SINKHORN_STEPS", 2000)
    for blur in (0.3, 0.05, 0.01):
        monkeypatch.setattr(distances, "SINKHORN_BLUR", blur)
        errors.append(abs(sinkhorn(x, y) - exact))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01 * exact


def test_frechet_of_gaussians_is_closed() -> None:
    """Of x and s x + m: |m|^2 + (s - 1)^2 tr C, exactly, for any sample."""
    x = normal(500, 3) @ torch.tensor([[1.0, 0.4, 0.0], [0.0, 0.5, 0.2], [0.0, 0.0, 2.0]])
    y = 1.5 * x + torch.tensor([1.0, 2.0, 2.0])
    centred = x - x.mean(0)
    means = (y.mean(0) - x.mean(0)).square().sum()
    expected = float(means + 0.25 * centred.square().sum() / (len(x) - 1))
    assert frechet(x, y) == pytest.approx(expected, rel=1e-5)


def test_frechet_of_few_rows_in_many_dimensions() -> None:
    """Where rows are fewer than dimensions the covariances are singular; scipy's root of their product agrees."""
    x, y = normal(20, 60).double(), 2 * normal(20, 60, 1).double() + 0.3
    cx, cy = x.T.cov().numpy(), y.T.cov().numpy()
    root = sqrtm(cx @ cy)
    expected = float((x.mean(0) - y.mean(0)).square().sum()) + float((cx + cy - 2 * root.real).trace())
    assert frechet(x, y) == pytest.approx(expected, rel=1e-4)


def test_mmd_is_unbiased_and_follows_its_definition() -> None:
    x, y = normal(5, 2), normal(5, 2, 1)
    width = float(torch.cdist(y, y).square().flatten().median())

    def kernel(a: Tensor, b: Tensor) -> float:
        return math.exp(-float((a - b).square().sum()) / (2 * width))

    pairs = list(itertools.permutations(range(5), 2))
    within = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs) / 20
    across = sum(kernel(a, b) for a in x for b in y) / 25
    assert mmd(x, y) == pytest.approx(within - 2 * across, abs=1e-6)
    repeated = [mmd(normal(50, 2, 2 * i), normal(50, 2, 2 * i + 1)) for i in range(60)]
    assert abs(sum(repeated) / 60) < 3 * torch.tensor(repeated).std() / math.sqrt(60)
