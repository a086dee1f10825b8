"""Paths from data to noise: schedules, conversions between predictions, the denoiser of a mixture, pairs by transport."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch

from whorl.generative.densities import GaussianMixture
from whorl.objectives.generative.diffusion import (
    CosineSchedule,
    GaussianPath,
    LinearBetas,
    Prediction,
    denoising,
)
from whorl.objectives.generative.flow import StraightPath, flow_matching, transport_pairs
from whorl.objectives.generative.score import VarianceExploding, score_matching

PATHS: list[GaussianPath] = [LinearBetas(), CosineSchedule(), StraightPath(), VarianceExploding(0.02, 8.0)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_schedules_have_the_published_products() -> None:
    steps = torch.arange(1, 1001, dtype=torch.float64)
    betas = torch.tensor([1e-4 + (0.02 - 1e-4) * n / 999 for n in range(1000)], dtype=torch.float64)
    linear = torch.cumprod(1 - betas, 0)
    found = LinearBetas().coefficients(steps / 1000)[0].square()
    torch.testing.assert_close(found, linear, atol=1e-9, rtol=1e-6)

    def bar(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    cosine = [min(1 - bar((n + 1) / 1000) / bar(n / 1000), 0.999) for n in range(1000)]
    product = torch.cumprod(1 - torch.tensor(cosine, dtype=torch.float64), 0)
    found = CosineSchedule().coefficients(steps / 1000)[0].square()
    torch.testing.assert_close(found, product, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_rates_are_derivatives(path: GaussianPath) -> None:
    t, h = torch.tensor([0.10005, 0.43005, 0.91005], dtype=torch.float64), 1e-5
    before, after = path.coefficients(t - h), path.coefficients(t + h)
    for i in (0, 1):
        difference = (after[i] - before[i]) / (2 * h)
        torch.testing.assert_close(path.coefficients(t)[i + 2], difference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_every_prediction_converts_to_every_other(path: GaussianPath) -> None:
    data, noise = normal(6, 3, 2, seed=1), normal(6, 3, 2, seed=2)
    point = path.at(torch.linspace(0.05, 0.9, 6), data)
    x = point.noisy(data, noise)
    for kind, other in itertools.product(get_args(Prediction), repeat=2):
        found = point.value(other, *point.split(kind, point.value(kind, data, noise), x))
        torch.testing.assert_close(found, point.value(other, data, noise), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(point.value("v", data, noise), point.a * noise - point.s * data)


@pytest.mark.parametrize("path", PATHS)
def test_optimal_denoiser_of_a_mixture_is_its_score(path: GaussianPath) -> None:
    mixture = GaussianMixture(torch.tensor([[-1.0, 0.5], [1.0, 0.0], [0.3, -1.2]]).double(), 0.3)
    x = normal(40, 2).double()
    point = path.at(0.4, x)
    a, s = float(point.a), float(point.s)
    variance = (a * mixture.std) ** 2 + s**2
    noisy = GaussianMixture(a * mixture.means, math.sqrt(variance))
    # E[x_0 | x_t] by its definition: posterior weights of the components, and the mean of each.
    weights = (-(x[:, None] - noisy.means).square().sum(-1) / (2 * variance)).softmax(1)
    means = mixture.means + (a * mixture.std**2 / variance) * (x[:, None] - noisy.means)
    best = (weights[..., None] * means).sum(1)
    y = x.clone().requires_grad_()
    (score,) = torch.autograd.grad(noisy.log_prob(y).sum(), y)
    torch.testing.assert_close(point.value("score", *point.split("x0", best, x)), score, atol=1e-6, rtol=1e-6)


def test_losses_are_sums_of_means_over_dimensions() -> None:
    a, b = normal(5, 2, 3), normal(5, 2, 3, seed=1)
    found = denoising(a, b)
    assert float(found.count) == 5
    torch.testing.assert_close(found.total, ((a - b) ** 2).sum() / 6)
    parts = [denoising(a[i : i + 1], b[i : i + 1]).total for i in range(5)]
    torch.testing.assert_close(sum(parts), found.total)
    torch.testing.assert_close(flow_matching(b - a, a, b).total, torch.tensor(0.0))
    point = VarianceExploding(0.02, 8.0).at(torch.linspace(0.1, 0.9, 5), a)
    weighted = point.s.square() * (b - point.value("score", a, a)).square()  # sigma^2 |score - target|^2
    torch.testing.assert_close(score_matching(b, a, point.s).total, weighted.sum() / 6)


def test_noise_scales_are_geometric() -> None:
    path = VarianceExploding(0.01, 10.0)
    a, s, _, _ = path.coefficients(torch.linspace(0, 1, 4, dtype=torch.float64))
    torch.testing.assert_close(s, torch.tensor([0.01, 0.1, 1.0, 10.0], dtype=torch.float64))
    assert torch.equal(a, torch.ones_like(a)) and path.start_std == 10


def test_transport_pairs_have_the_least_cost_within_classes() -> None:
    data, noise = normal(6, 2), normal(6, 2, seed=1)

    def cost(order: torch.Tensor) -> float:
        return float((data - noise[order]).square().sum())

    best = min(cost(torch.tensor(order)) for order in itertools.permutations(range(6)))
    assert cost(transport_pairs(data, noise)) == pytest.approx(best)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    order = transport_pairs(data, noise, labels)
    assert torch.equal(labels[order], labels) and sorted(order.tolist()) == list(range(6))
    assert best <= cost(order) <= cost(torch.arange(6))
