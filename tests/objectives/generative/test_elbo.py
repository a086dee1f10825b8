"""The bound: closed forms against torch.distributions, free bits, and importance weights on a model that is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from whorl.objectives.generative.elbo import elbo, gaussian_log_prob, importance_bound, kl_from_prior


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_closed_forms_equal_those_of_torch() -> None:
    mean, log_std, x = normal(5, 3), normal(5, 3, seed=1), normal(5, 3, seed=2)
    posterior = Normal(mean, log_std.exp())
    wanted = kl_divergence(posterior, Normal(torch.zeros(()), torch.ones(())))
    torch.testing.assert_close(kl_from_prior(mean, log_std), wanted)
    torch.testing.assert_close(gaussian_log_prob(x, mean, log_std), posterior.log_prob(x).sum(1))


def test_free_bits_leave_cheap_dimensions_without_gradient() -> None:
    kl = torch.tensor([[0.1, 2.0], [0.7, 0.2]], requires_grad=True)
    loss = elbo(torch.tensor([-1.0, -3.0]), kl, beta=2.0, free_bits=0.5)
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert float(loss.total.detach()) == pytest.approx(4.0 + 2.0 * (0.5 + 2.0 + 0.7 + 0.5))
    assert float(loss.count) == 2
    assert kl.grad is not None and kl.grad.tolist() == [[0, 2], [2, 0]]
    assert float(loss.metrics["kl"]) == 3.0 and float(loss.metrics["reconstruction"]) == 4.0


def test_importance_bound_rises_to_the_exact_density() -> None:
    """z ~ N(0, 1), x | z ~ N(z, 0.5^2), so x ~ N(0, 1.25); the posterior of the test is too wide."""
    x, std = normal(200, 1, seed=3), torch.tensor([[0.5]], dtype=torch.float64)
    exact = Normal(0.0, 1.25**0.5).log_prob(x).sum(1)
    mean, log_std, zero = 0.8 * x, torch.full_like(x, 0.6).log(), torch.zeros_like(x)

    def log_weight(seed: int) -> Tensor:
        z = mean + log_std.exp() * normal(200, 1, seed=seed)
        joint = gaussian_log_prob(z, zero, zero) + gaussian_log_prob(x, z, std.log())
        return joint - gaussian_log_prob(z, mean, log_std)

    weights = torch.stack([log_weight(seed) for seed in range(10, 74)])
    bounds = [torch.stack([importance_bound(w) for w in weights.split(k)]) for k in (1, 8, 64)]
    gaps = [float((exact - bound.mean(0)).mean()) for bound in bounds]
    wide, right = (Normal(torch.zeros(()), torch.tensor(std)) for std in (0.6, 0.2**0.5))
    divergence = float(kl_divergence(wide, right))
    assert gaps[0] == pytest.approx(divergence, abs=0.02)
    assert gaps[0] > 4 * gaps[1] > 16 * gaps[2] > 0 and gaps[2] < 0.005
