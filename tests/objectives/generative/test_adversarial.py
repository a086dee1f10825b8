"""Adversarial losses: values by hand, their optima on known densities, the penalty of the slope."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from whorl.models.critic import Critic
from whorl.objectives.generative.adversarial import (
    AdversarialLoss,
    critic_loss,
    generator_loss,
    slope_penalty,
)


@pytest.mark.parametrize(
    ("kind", "critic", "generator"),
    [
        ("non-saturating", math.log1p(math.exp(-2)) + math.log1p(math.exp(0.5)), math.log1p(math.exp(-0.5))),
        ("hinge", 0.0 + 1.5, -0.5),
        ("wasserstein", 0.5 - 2.0, -0.5),
    ],
)
def test_losses_have_the_published_values(kind: AdversarialLoss, critic: float, generator: float) -> None:
    real, fake = torch.full((3,), 2.0), torch.full((3,), 0.5)
    found = critic_loss(kind, real, fake, torch.tensor([1.0, 2.0, 0.0]))
    assert float(found.total) == pytest.approx(3 * critic + 3) and float(found.count) == 3
    assert float(generator_loss(kind, fake).total) == pytest.approx(3 * generator)


@pytest.mark.parametrize("kind", get_args(AdversarialLoss))
def test_losses_of_patches_are_averaged(kind: AdversarialLoss) -> None:
    real, fake = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    flat = critic_loss(kind, real.flatten(), fake.flatten())
    found, generated = critic_loss(kind, real, fake), generator_loss(kind, fake)
    assert float(found.count) == 3 == float(generated.count)
    torch.testing.assert_close(found.total / 3, flat.total / 12)
    torch.testing.assert_close(generated.total / 3, generator_loss(kind, fake.flatten()).total / 12)
    w = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    penalty = slope_penalty(lambda z: z @ w, real[:, :2], fake[:, :2], torch.ones(3))
    torch.testing.assert_close(penalty, torch.full((3,), 2.25))  # the slope of the mean of two patches: 2.5


def test_best_discriminator_gives_the_jensen_shannon_divergence() -> None:
    p, q = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(1.0, 0.7)
    levels = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    x, y = p.icdf(levels), q.icdf(levels)
    found = critic_loss("non-saturating", p.log_prob(x) - q.log_prob(x), p.log_prob(y) - q.log_prob(y))
    grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    a, b = p.log_prob(grid).exp(), q.log_prob(grid).exp()
    middle = (a + b) / 2
    divergence = (
        (torch.special.xlogy(a, a / middle) + torch.special.xlogy(b, b / middle)).sum() / 2 * 18 / 20_000
    )
    assert -float(found.total / found.count) == pytest.approx(2 * float(divergence) - math.log(4), abs=1e-4)


def test_slope_penalty_of_a_linear_critic_is_exact() -> None:
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 6, 2, generator=rng)
    penalty = slope_penalty(lambda z: z @ w, x, y, torch.rand(6, generator=rng))
    torch.testing.assert_close(penalty, torch.full((6,), 16.0))
    (gradient,) = torch.autograd.grad(penalty.mean(), w)  # 2 (|w| - 1) w / |w|
    torch.testing.assert_close(gradient, torch.tensor([4.8, 6.4]))
    with torch.no_grad():
        assert float(slope_penalty(lambda z: z @ w, x, y, torch.ones(6))[0]) == pytest.approx(16.0)


def test_slope_is_taken_between_the_pairs() -> None:
    seen = list[Tensor]()

    def critic(z: Tensor) -> Tensor:
        seen.append(z.detach())
        return z.square().sum(1)

    x, y, mix = torch.ones(3, 2), torch.zeros(3, 2), torch.tensor([1.0, 0.25, 0.0])
    penalty = slope_penalty(critic, x, y, mix)
    torch.testing.assert_close(seen[0], mix[:, None].expand(3, 2))
    torch.testing.assert_close(penalty, (2 * math.sqrt(2) * mix - 1).square())


def test_critic_with_penalty_finds_the_wasserstein_distance() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2, generator=rng) * 0.5
    y = torch.randn(64, 2, generator=rng) * 0.5 + torch.tensor([1.0, 0.3])
    cost = torch.cdist(x, y)
    exact = float(cost[linear_sum_assignment(cost.numpy())].mean())
    critic, weight = Critic((2,), 32, 2, generator=rng), 20.0
    optimizer = torch.optim.Adam(critic.parameters(), 5e-3, betas=(0.5, 0.9))
    values = []
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 300)
        order = torch.randperm(64, generator=rng)
        penalty = weight * slope_penalty(critic, x, y[order], torch.rand(64, generator=rng))
        loss = critic_loss("wasserstein", critic(x), critic(y), penalty)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
        values.append(-float(loss.total.detach() / loss.count))
    assert sum(values[-20:]) / 20 == pytest.approx(exact, rel=0.1)
