"""A linear layer with an fp32 master weight.

The product runs in the type of its input: bf16 activations are multiplied with a bf16 copy of the weight, cast at each
call. The gradient reaches the fp32 weight through the cast, or in fp32 from a C++ kernel (`nn/cpu/linear.py`).
`matmul` replaces the product, for example by fp8 (`nn/float8.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from whorl.nn.cpu import linear as native


class Linear(nn.Module):
    """y = x W^T, plus an optional bias. x: [..., d_in] -> [..., d_out]; weight: [d_out, d_in].

    Args:
        std: standard deviation of the initial weights; 0 makes a layer whose first output is 0, which makes a new
            residual branch the identity (as in muP).
    """

    # (x, fp32 weight, bias in the type of x) -> y; None is the product in the type of x.
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
        if bias is None and native.is_chosen(x, self.weight):
            return native.linear(x, self.weight)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)
