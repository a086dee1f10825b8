"""A linear layer whose master weight stays fp32.

The product runs in the type of its input: bf16 activations meet a bf16 copy of the weight, made on the fly (a
weight is small beside the activations it multiplies). The gradient arrives in fp32, through the cast. Another product
may be put in its place (`product`): fp8's, `nn/float8.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T, plus a bias if asked for.  x: [..., d_in] -> [..., d_out]; weight: [d_out, d_in].

    Args:
        std: standard deviation of the initial weights; 0 makes a layer that first outputs nothing, which leaves
            a residual branch silent at the start (as in muP and GPT-2's successors).
    """

    # (x, weight as it is kept, bias in the type of x) -> y; None: the one in the type of x
    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        std: float,
        bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        weight = torch.randn(d_out, d_in, generator=generator) * std if std else torch.zeros(d_out, d_in)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.matmul is not None:
            return self.matmul(x, self.weight, bias)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)
