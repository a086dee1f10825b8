"""KL estimators summed over all outcomes, values and gradients; the controller against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.objectives.divergences import KLEstimator, adapt_kl_coef, kl_estimate, kl_reward


def policies() -> tuple[Tensor, Tensor]:
    """Return logits of pi [7] with gradient, and log-probabilities of a reference [7]."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)
    other = logits.detach() + torch.randn(7, generator=g, dtype=torch.float64)
    return logits, other.log_softmax(0)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def expected(estimator: KLEstimator, logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[k] over all outcomes, and E[grad k] with fixed samples."""
    log_prob = logits.log_softmax(0)
    k = kl_estimate(log_prob, reference, estimator)
    mean = (log_prob.exp().detach() * k).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: KLEstimator) -> None:
    logits, reference = policies()
    wanted = kl(logits.log_softmax(0), reference).detach()
    assert_close(expected(estimator, logits, reference)[0], wanted)


def test_kl_estimate_gradients_match_theory() -> None:
    logits, reference = policies()
    log_prob = logits.log_softmax(0)
    (forward,) = torch.autograd.grad(kl(reference, log_prob), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad(kl(log_prob, reference), logits)
    nothing = torch.zeros(7, dtype=torch.float64)
    for estimator, gradient in (("k1", nothing), ("k2", reverse), ("k3", forward)):
        assert_close(expected(estimator, logits, reference)[1], gradient)  # type: ignore[arg-type]


def test_kl_reward_gives_reverse_kl_gradient() -> None:
    logits, reference = policies()
    log_prob = logits.log_softmax(0)
    reward = kl_reward(log_prob, reference, 0.5)
    assert not reward.requires_grad
    objective = (log_prob.exp().detach() * reward * log_prob).sum()  # E[r grad log pi]
    (found,) = torch.autograd.grad(objective, logits, retain_graph=True)
    (reverse,) = torch.autograd.grad(kl(log_prob, reference), logits)
    assert_close(found, -0.5 * reverse)


def test_k3_stays_finite_for_unlikely_token() -> None:
    log_prob = torch.tensor([-200.0], requires_grad=True)
    k = kl_estimate(log_prob, torch.zeros(1), "k3")
    k.sum().backward()
    assert bool(k.isfinite().all()) and log_prob.grad is not None and bool(log_prob.grad.isfinite().all())


CONTROLLER = [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98), (5.4, 0.99)]


@pytest.mark.parametrize("measured, expected", CONTROLLER)
def test_adapt_kl_coef_matches_formula(measured: float, expected: float) -> None:
    assert adapt_kl_coef(1.0, measured, 6.0) == pytest.approx(expected)


def test_adapt_kl_coef_converges_to_target() -> None:
    weight = 0.01
    for _ in range(2000):
        weight = adapt_kl_coef(weight, 1.0 / weight, 5.0)  # a policy whose KL is 1 / weight
    assert weight == pytest.approx(0.2, rel=1e-3)


def test_divergences_reject_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        adapt_kl_coef(1.0, 1.0, 0.0)
