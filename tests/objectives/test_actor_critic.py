"""A2C and PPO losses against their equations, step by step, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.support.nn.checks import assert_same_gradients, assert_same_losses, randn
from torch import Tensor

from whorl.objectives.actor_critic import a2c, ppo


@dataclass
class Judged:
    log_prob: Tensor
    entropy: Tensor
    value: Tensor


def steps(n: int = 200) -> tuple[Judged, Tensor, Tensor, Tensor]:
    """Return output, behaviour_log_prob, advantage, target; ratios are on both sides of any clip."""
    output = Judged(*(randn(n, seed=seed, dtype=torch.float64, grad=True) for seed in range(3)))
    behaviour, advantage, target = (randn(n, seed=seed, dtype=torch.float64) for seed in range(3, 6))
    return output, output.log_prob.detach() + 0.3 * behaviour, advantage, target


@pytest.mark.parametrize("clip", [0.05, 0.2])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
def test_ppo_matches_equations_7_and_9(clip: float, entropy_weight: float) -> None:
    output, behaviour, advantage, target = steps()
    loss = ppo(output, behaviour, advantage, target, clip=clip, value_coef=0.7, entropy_coef=entropy_weight)
    r = (output.log_prob - behaviour).exp()
    clipped = r.clamp(1 - clip, 1 + clip)
    total = -torch.minimum(r * advantage, clipped * advantage)
    total = total + 0.7 * (output.value - target) ** 2 / 2 - entropy_weight * output.entropy
    assert_same_losses(loss.total, total.sum(), [output.log_prob, output.value])
    assert float(loss.count) == len(advantage)
    assert int(loss.metrics["clip_fraction"]) == int((r != clipped).sum()) > 20


def test_ppo_gradient_equals_a2c_at_ratio_one() -> None:
    output, _, advantage, target = steps()
    first = ppo(output, output.log_prob.detach(), advantage, target).total
    assert_same_gradients(first, a2c(output, advantage, target).total, [output.log_prob, output.value])
