"""Denoising score matching: a network predicts the gradient of the log-density of noisy data, at many scales of noise.

    x_t = x_0 + sigma eps,    loss = sigma^2 |score(x_t, t) - grad log p(x_t | x_0)|^2 = |sigma score(x_t, t) + eps|^2

The regression has one answer, the score of the noisy density (Vincent 2011, doi:10.1162/NECO_a_00142). The weight sigma^2
gives the scales equal weight (Song & Ermon 2019, arXiv:1907.05600, eq. 5 and 6). It differs from `diffusion.py` in the path:
the data keep their scale, and the noise grows until nothing is seen of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.objectives.generative.diffusion import GaussianPath, denoising
from whorl.objectives.next_token import Loss


class VarianceExploding(GaussianPath):
    """a = 1, s = low (high / low)^t: a geometric sequence of noise (Song et al. 2021, arXiv:2011.13456, eq. 30).

    At t = 0 noise of the standard deviation `low` remains. `high` must be far beyond the data's standard deviation,
    because sampling begins with N(0, high^2) in place of the noisy density.
    """

    def __init__(self, low: float, high: float) -> None:
        self.low, self.start_std = low, high

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_ratio = torch.tensor(self.start_std / self.low, dtype=torch.float64).log()
        s = self.low * (t * log_ratio).exp()
        return torch.ones_like(t), s, torch.zeros_like(t), s * log_ratio


def score_matching(score: Tensor, noise: Tensor, s: Tensor) -> Loss:
    """Return the weighted mean square of the score's error, summed over rows.

    Args:
        score, noise: [N, ...]. s: sigma, in a shape that multiplies them.
    """
    return denoising(s * score, -noise)
