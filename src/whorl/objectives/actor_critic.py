"""Actor-critic losses: A2C, and PPO as a change to A2C.

    A2C   loss = - log pi(a|s) A  +  c_v (V(s) - R)^2 / 2  -  c_e H(pi(.|s))           summed over steps
    PPO   the first term becomes  - min(r A, clip(r, 1 - e, 1 + e) A),  r = pi(a|s) / pi_old(a|s)

Sources: Mnih et al. 2016, arXiv:1602.01783, section 4; Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9.
IMPALA is A2C with advantages and targets from V-trace (`advantages.estimators.v_trace`). PPO makes several passes over
the same steps. The clip removes the gradient of steps whose probability has already moved further than e.

`behaviour_log_prob` comes from the weights that acted, `log_prob` from the weights in training. In PPO the proximal
policy is the one that acted, because each record is used once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from whorl.objectives.next_token import Loss


class ActorCriticOutput(Protocol):
    """Output of a policy for N steps; each field is [N]."""

    @property
    def log_prob(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...


def a2c(
    output: ActorCriticOutput,
    advantage: Tensor,
    target: Tensor,
    *,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
) -> Loss:
    """Return the advantage actor-critic loss over N steps.

    Args:
        output: log-probabilities of the actions taken, entropies and values, with gradients; each [N].
        advantage, target: [N], without gradients.
    """
    policy_loss = -(output.log_prob * advantage).sum()
    return _actor_critic_loss(policy_loss, output, target, value_coef, entropy_coef, {})


def ppo(
    output: ActorCriticOutput,
    behaviour_log_prob: Tensor,
    advantage: Tensor,
    target: Tensor,
    *,
    clip: float | Tensor = 0.2,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
) -> Loss:
    """Return the A2C loss with the clipped ratio of PPO.

    behaviour_log_prob: [N], of the policy that acted. The other arguments are those of `a2c`.

    Metrics: `kl`, the k3 estimate (r - 1) - log r of the KL (http://joschu.net/blog/kl-approx.html), and
    `clip_fraction`, the share of steps whose ratio left the range.
    """
    log_ratio = output.log_prob - behaviour_log_prob
    ratio = log_ratio.exp()
    # min(r A, clip(r) A) = min(r A, A + e |A|): where A > 0 the upper bound is active, where A < 0 the lower bound.
    clipped = torch.minimum(ratio * advantage, advantage + clip * advantage.abs())
    moved_ratio = ratio.detach()
    extra_metrics = {
        "kl": (moved_ratio - 1 - log_ratio.detach()).sum(),
        "clip_fraction": ((moved_ratio - 1).abs() > clip).sum(),
    }
    return _actor_critic_loss(-clipped.sum(), output, target, value_coef, entropy_coef, extra_metrics)


def surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Loss:
    """Return the loss - ratio x advantage of N steps (arXiv:1502.05477, eq. 14); at the old policy A2C's gradient."""
    total = -((log_prob - old_log_prob).exp() * advantage).sum()
    return Loss(total, torch.tensor(float(len(advantage))), {})


def value_regression(value: Tensor, target: Tensor) -> Loss:
    """Return half the squares of values [N] against targets [N]."""
    squares = 0.5 * mse_loss(value, target, reduction="sum")
    return Loss(squares, torch.tensor(float(len(target))), {"value_loss": squares.detach()})


def _actor_critic_loss(
    policy_loss: Tensor,
    output: ActorCriticOutput,
    target: Tensor,
    value_coef: float,
    entropy_coef: float,
    extra_metrics: dict[str, Tensor],
) -> Loss:
    squares = mse_loss(output.value, target, reduction="sum")
    entropy = output.entropy.sum()
    total = policy_loss + 0.5 * value_coef * squares
    if entropy_coef:  # skipped at 0, because its gradient costs as much as that of the policy
        total = total - entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": 0.5 * squares.detach(),
        "entropy": entropy.detach(),
        **extra_metrics,
    }
    return Loss(total, torch.tensor(float(target.numel())), metrics)
