"""Losses of action values Q(s, a).

    DQN     y = r + discount Q'(s', b)        Q' with earlier weights, b = argmax Q', or argmax Q (double DQN)
    DDPG    y = r + discount Q'(s', mu'(s')),                  the policy maximizes Q(s, mu(s))
    SAC     y = r + discount (Q'(s', b) - alpha log pi(b|s')), the policy maximizes Q - alpha log pi

Q' of several critics is the least of them (Fujimoto et al. 2018, arXiv:1802.09477, eq. 10). Sources: Mnih et al. 2015,
doi:10.1038/nature14236; van Hasselt et al. 2016, arXiv:1509.06461, eq. 4; Lillicrap et al. 2016, arXiv:1509.02971;
Haarnoja et al. 2018, arXiv:1812.05905, eq. 5, 9 and 18; Christodoulou 2019, arXiv:1910.07207 for discrete actions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from whorl.objectives.next_token import Loss


@torch.no_grad()
def q_target(reward: Tensor, next_discount: Tensor, next_values: Tensor, chooser: Tensor) -> Tensor:
    """Return targets [..., N] of the values of the actions taken.

    Args:
        reward: [N], of one or several steps. next_discount: [N] factor on what follows; 0 where the episode terminated.
        next_values: [..., N, A] of the target network. chooser: [..., N, A] values whose maximum chooses the next action.
    """
    return reward + next_discount * next_values.gather(-1, chooser.argmax(dim=-1, keepdim=True)).squeeze(-1)


def q_loss(value: Tensor, target: Tensor, weight: Tensor) -> Loss:
    """Return Huber's loss of values [K, N] of K networks against targets [K, N], with weights [N], summed over both."""
    each = smooth_l1_loss(value, target, reduction="none")
    return Loss((weight * each).sum(), torch.tensor(float(len(weight))), {"value": value[0].detach().sum()})


def critics_loss(values: Tensor, target: Tensor, weight: Tensor) -> Loss:
    """Return half the weighted squares of the values [K, N] of K critics against one target [N], summed over the critics."""
    squares = (values - target).square() * weight
    return Loss(0.5 * squares.sum(), torch.tensor(float(len(target))), {"value": values[0].detach().sum()})


def deterministic_policy_loss(value: Tensor) -> Loss:
    """Return - Q(s, mu(s)) over N states; value: [N], with gradients to the actions."""
    return Loss(-value.sum(), torch.tensor(float(len(value))), {})


def soft_policy_loss(
    probability: Tensor | None,
    log_prob: Tensor,
    value: Tensor,
    log_temperature: Tensor,
    target_entropy: float,
) -> Loss:
    """Return the loss of a policy with entropy, and of the temperature alpha that holds the entropy at its target.

    Args:
        probability: [N, A] of all actions; None if `log_prob` belongs to one sampled action.
        log_prob: [N, A], or [N] of an action sampled with gradients.
        value: as `log_prob`: the least of the critics' values.
        log_temperature: scalar, log alpha.
    """
    alpha = log_temperature.detach().exp()
    entropy = -log_prob if probability is None else -(probability * log_prob).sum(-1)
    mean_value = value if probability is None else (probability * value).sum(-1)
    policy = -(alpha * entropy + mean_value).sum()
    temperature = log_temperature * (entropy.detach() - target_entropy).sum()
    metrics = {"entropy": entropy.detach().sum(), "temperature": alpha * len(entropy)}
    return Loss(policy + temperature, torch.tensor(float(len(entropy))), metrics)
