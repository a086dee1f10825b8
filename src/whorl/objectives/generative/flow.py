"""Flow matching: regress the velocity of a straight path from data to noise.

    x_t = (1 - t) x_0 + t eps,     loss = |u(x_t, t) - (eps - x_0)|^2

It differs from diffusion in the path alone: this one is straight, so few steps of an ODE follow it. Sources: Lipman et al.
2023, arXiv:2210.02747, eq. 23 with minimal width 0; Liu et al. 2023, arXiv:2209.03003. Time runs from data to noise.

`transport_pairs` exchanges the noise of a batch so that the sum of squared distances to the data is least. The paths then
cross less and are straighter (Pooladian et al. 2023, arXiv:2304.14772; Tong et al. 2024, arXiv:2302.00482).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whorl.objectives.generative.diffusion import GaussianPath, denoising
from whorl.objectives.next_token import Loss


class StraightPath(GaussianPath):
    """a = 1 - t, s = t."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        one = torch.ones_like(t)
        return 1 - t, t, -one, one


def flow_matching(velocity: Tensor, data: Tensor, noise: Tensor) -> Loss:
    """Return the mean square of the velocity's error, summed over rows; all [N, ...]."""
    return denoising(velocity, noise - data)


def transport_pairs(data: Tensor, noise: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return the order [N] of the noise of the optimal transport to data [N, ...], on the CPU.

    labels: [N] classes. Rows exchange noise within a class only, so that the noise of each class stays normal.
    """
    from scipy.optimize import linear_sum_assignment

    order = torch.arange(len(data))
    groups = torch.zeros(len(data), dtype=torch.long) if labels is None else labels
    for group in torch.unique(groups):
        rows = order[groups == group].clone()
        cost = torch.cdist(data[rows].flatten(1).double(), noise[rows].flatten(1).double()).square()
        order[rows] = rows[torch.from_numpy(np.asarray(linear_sum_assignment(cost.numpy())[1]))]
    return order
