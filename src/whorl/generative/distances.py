"""Distances between two sets of samples [N, d] of equal size. Each is 0 for equal distributions, up to chance.

    sliced_wasserstein   W_2 of projections on random directions      Rabin et al. 2012, doi:10.1007/978-3-642-24785-9_37
    wasserstein          W_2 of the sets, exact
    sinkhorn             W_2 with an entropic penalty, debiased       Feydy et al. 2019, arXiv:1810.08278, eq. 3
    mmd                  squared mean discrepancy, Gaussian kernel    Gretton et al. 2012, lemma 6 (it may be negative)
    frechet              of Gaussians with the sets' moments          Heusel et al. 2017, arXiv:1706.08500, eq. 6

The distance of two finite sets of one distribution is not 0, and depends on their size. So a distance is compared with
that of real data to real data (`measures.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PROJECTIONS = 256
SINKHORN_STEPS, SINKHORN_BLUR = 50, 0.1  # blur: penalty / median squared distance


def sliced_wasserstein(x: Tensor, y: Tensor) -> float:
    """Return the root of the mean squared W_2 over fixed random directions."""
    directions = torch.randn(x.shape[1], PROJECTIONS, generator=torch.Generator().manual_seed(0)).to(x)
    directions = directions / directions.norm(dim=0)
    difference = (x @ directions).sort(dim=0).values - (y @ directions).sort(dim=0).values
    return float(difference.square().mean().sqrt())


def wasserstein(x: Tensor, y: Tensor) -> float:
    """Return W_2 by the best assignment; time grows with N^3."""
    from scipy.optimize import linear_sum_assignment

    costs = squared_distances(x, y).numpy()
    return math.sqrt(max(0.0, float(costs[linear_sum_assignment(costs)].mean())))


def sinkhorn(x: Tensor, y: Tensor) -> float:
    """Return the root of the debiased cost: that of x to y, less half of those of x to x and y to y."""
    penalty = SINKHORN_BLUR * float(squared_distances(x, y).median())
    total = entropic_cost(x, y, penalty) - (entropic_cost(x, x, penalty) + entropic_cost(y, y, penalty)) / 2
    return math.sqrt(max(0.0, total))


def entropic_cost(x: Tensor, y: Tensor, penalty: float) -> float:
    """Return the dual value of transport of x to y with squared costs, with `penalty` times the KL to independence.

    Costs above 600 penalties count as 600, so that their kernel is not 0.
    """
    kernel = (-squared_distances(x, y) / penalty).clamp_min(-600).exp()
    u = torch.ones(len(x), dtype=kernel.dtype)
    for _ in range(SINKHORN_STEPS):
        v = len(x) / (kernel.T @ u)
        u = (u * len(y) / (kernel @ v)).sqrt()  # the mean of two steps converges where x is y, too
    return penalty * float(u.log().mean() + v.log().mean())


def mmd(x: Tensor, y: Tensor) -> float:
    """Return the unbiased estimate with a Gaussian kernel, whose width is the median distance within y."""
    within_y = squared_distances(y, y)
    width = float(within_y.median()) or 1.0

    def mean(squares: Tensor, same: bool) -> float:
        kernel, n = (-squares / (2 * width)).exp(), len(squares)
        return float((kernel.sum() - n) / (n * (n - 1)) if same else kernel.mean())

    return (
        mean(squared_distances(x, x), True) + mean(within_y, True) - 2 * mean(squared_distances(x, y), False)
    )


def frechet(x: Tensor, y: Tensor) -> float:
    """Return |m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2))."""
    x, y = x.double(), y.double()
    a, b = ((rows - rows.mean(0)) / (len(rows) - 1) ** 0.5 for rows in (x, y))  # C_x = a^T a
    # The eigenvalues of C_x C_y are the squares of the singular values of a b^T, or of the factors R of a and b.
    middle = torch.linalg.svdvals(torch.linalg.qr(a, "r")[1] @ torch.linalg.qr(b, "r")[1].T).sum()
    return float((x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * middle)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return [N, M] in fp64, by one product of matrices."""
    x, y = x.double(), y.double()
    squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    return squares.clamp_min(0)
