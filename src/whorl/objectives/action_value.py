"""Losses of action values Q(s, a).

    y = r + discount Q'(s', b)        Q' with earlier weights, b = argmax Q' (DQN), or argmax Q (double DQN)

Sources: Mnih et al. 2015, doi:10.1038/nature14236; van Hasselt et al. 2016, arXiv:1509.06461, eq. 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

from whorl.objectives.next_token import Loss


@torch.no_grad()
def q_target(reward: Tensor, next_discount: Tensor, next_values: Tensor, chooser: Tensor) -> Tensor:
    """Return targets [N] of the values of the actions taken.

    Args:
        reward: [N], of one or several steps. next_discount: [N] factor on what follows; 0 where the episode terminated.
        next_values: [N, A] of the target network. chooser: [N, A] values whose maximum chooses the next action.
    """
    return reward + next_discount * next_values.gather(1, chooser.argmax(dim=1, keepdim=True)).squeeze(1)


def q_loss(value: Tensor, target: Tensor, weight: Tensor, *, huber: bool = True) -> Loss:
    """Return the weighted loss of values [N] against targets [N]: Huber's, or half the square."""
    loss = smooth_l1_loss if huber else mse_loss
    each = loss(value, target, reduction="none")
    total = (weight * each).sum() * (1.0 if huber else 0.5)
    return Loss(total, torch.tensor(float(len(value))), {"value": value.detach().sum()})
