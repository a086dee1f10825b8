"""A linear layer whose master weight stays fp32.

The product runs in the type of its input: bf16 activations meet a bf16 copy of the weight, made on the fly (a
weight is small beside the activations it multiplies). The gradient arrives in fp32, through the cast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T without bias.  x: [..., d_in] -> [..., d_out]; weight: [d_out, d_in].

    Args:
        std: standard deviation of the initial weights; 0 makes a layer that first outputs nothing, which leaves
            a residual branch silent at the start (as in muP and GPT-2's successors).
    """

    def __init__(
        self, d_in: int, d_out: int, *, std: float, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        weight = torch.randn(d_out, d_in, generator=generator) * std if std else torch.zeros(d_out, d_in)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))
