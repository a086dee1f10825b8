"""A2C and PPO losses against their equations, step by step, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from whorl.objectives.actor_critic import a2c, ppo


@dataclass
class Judged:
    log_prob: Tensor
    entropy: Tensor
    value: Tensor


def steps(n: int = 200) -> tuple[Judged, Tensor, Tensor, Tensor]:
    """Return output, behaviour_log_prob, advantage, target; ratios are on both sides of any clip."""
    g = torch.Generator().manual_seed(3)
    behaviour = -torch.rand(n, generator=g, dtype=torch.float64)
    output = Judged(
        *(t.requires_grad_() for t in torch.randn(3, n, generator=g, dtype=torch.float64).mul(0.4).unbind())
    )
    return output, behaviour, *torch.randn(2, n, generator=g, dtype=torch.float64).unbind()


@pytest.mark.parametrize("clip", [0.05, 0.2])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
def test_ppo_matches_equations_7_and_9(clip: float, entropy_weight: float) -> None:
    output, behaviour, advantage, target = steps()
    loss = ppo(output, behaviour, advantage, target, clip=clip, value_coef=0.7, entropy_coef=entropy_weight)
    inputs = [output.log_prob, output.value]
    found = torch.autograd.grad(loss.total, inputs, retain_graph=True)
    total, outside = torch.zeros(()), 0
    for i in range(len(advantage)):
        r = (output.log_prob[i] - behaviour[i]).exp()
        clipped = r.clamp(1 - clip, 1 + clip)
        total = total - torch.minimum(r * advantage[i], clipped * advantage[i])
        total = total + 0.7 * (output.value[i] - target[i]) ** 2 / 2 - entropy_weight * output.entropy[i]
        outside += int(r != clipped)
    assert torch.allclose(loss.total, total) and float(loss.count) == len(advantage)
    for got, expected in zip(found, torch.autograd.grad(total, inputs), strict=True):
        assert torch.allclose(got, expected)
    assert int(loss.metrics["clip_fraction"]) == outside > 20


def test_ppo_gradient_equals_a2c_at_ratio_one() -> None:
    output, _, advantage, target = steps()
    first = ppo(output, output.log_prob.detach(), advantage, target).total
    second = a2c(output, advantage, target).total
    for a, b in zip(
        torch.autograd.grad(first, [output.log_prob, output.value]),
        torch.autograd.grad(second, [output.log_prob, output.value]),
        strict=True,
    ):
        assert torch.allclose(a, b)
