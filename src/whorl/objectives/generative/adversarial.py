"""Adversarial losses: a critic D compares data x with samples y = G(z), and the generator G follows the critic.

                     critic, minimized                         generator, minimized
    non-saturating   softplus(-D(x)) + softplus(D(y))          softplus(-D(y))      Goodfellow et al. 2014, arXiv:1406.2661
    hinge            relu(1 - D(x)) + relu(1 + D(y))           -D(y)                Lim & Ye 2017, arXiv:1705.02894
    wasserstein      D(y) - D(x)                               -D(y)                Arjovsky et al. 2017, arXiv:1701.07875

Each decides what the generator minimizes when the critic is at its optimum:

    non-saturating   log p(x) / q(x) is the best D; its loss is 2 log 2 - 2 JS(p, q)
    wasserstein      the least loss over the critics of Lipschitz constant 1 is -W1(p, q)

Bounds on the weights keep a critic's Lipschitz constant finite (clipping, or spectral norm: `models/critic.py`). A penalty
on the slope at random points between x and y brings it to 1 (Gulrajani et al. 2017, arXiv:1704.00028, eq. 3):

    lambda (|grad D(u)| - 1)^2,    u = m x + (1 - m) y,   m ~ uniform(0, 1)

With a penalty of weight lambda the best slope is not 1: for two points at distance W it is 1 + W / (2 lambda). The value
of the objective, slope W - lambda (slope - 1)^2, is W + W^2 / (4 lambda).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.objectives.next_token import Loss

AdversarialLoss = Literal["non-saturating", "hinge", "wasserstein"]


def row_means(values: Tensor) -> Tensor:
    """Return [N] of values [N], or [N, P] of patches."""
    return values if values.ndim == 1 else values.mean(1)


def critic_loss(kind: AdversarialLoss, real: Tensor, fake: Tensor, penalty: Tensor | None = None) -> Loss:
    """Return the critic's loss, summed over rows.

    Args:
        real, fake: values of data and of samples, [N], or [N, P] of patches, whose losses are averaged.
        penalty: [N], added.
    """
    if kind == "non-saturating":
        rows = F.softplus(-real) + F.softplus(fake)
    elif kind == "hinge":
        rows = F.relu(1 - real) + F.relu(1 + fake)
    else:
        rows = fake - real
    rows, real, fake = row_means(rows), row_means(real), row_means(fake)
    metrics = {"critic/real": real.sum().detach(), "critic/fake": fake.sum().detach()}
    if penalty is not None:
        rows, metrics["critic/penalty"] = rows + penalty, penalty.sum().detach()
    return Loss(rows.sum(), torch.tensor(float(len(real)), device=real.device), metrics)


def generator_loss(kind: AdversarialLoss, fake: Tensor) -> Loss:
    """Return the generator's loss of the critic's values [N] or [N, P] of samples, summed over rows."""
    rows = row_means(F.softplus(-fake) if kind == "non-saturating" else -fake)
    return Loss(rows.sum(), torch.tensor(float(len(fake)), device=fake.device))


def slope_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return (|grad D| - 1)^2 [N] between pairs of rows; differentiable by the critic's parameters.

    Args:
        critic: [N, ...] -> [N] or [N, P], each value of one row alone. real, fake: [N, ...]. mix: m [N].
    """
    with torch.enable_grad():
        m = mix.view(-1, *[1] * (real.ndim - 1))
        between = (m * real + (1 - m) * fake).detach().requires_grad_()
        (slope,) = torch.autograd.grad(row_means(critic(between)).sum(), between, create_graph=True)
        squares: Tensor = (slope.flatten(1).norm(dim=1) - 1).square()
    return squares
