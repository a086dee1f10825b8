"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    y = x / sqrt(mean(x^2) + eps) * gain

The mean is taken in fp32 whatever the type of x: in bf16, eight bits of mantissa would make a sum of hundreds
of squares drift. The result goes back to the type of x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor | None = None, eps: float = EPS) -> Tensor:
    """x: [..., d] -> [..., d], same dtype; gain: [d] or None for 1."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (y if gain is None else y * gain).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain, which starts at 1.  x: [..., d]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)
