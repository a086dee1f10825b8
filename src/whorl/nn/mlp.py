"""The two-layer perceptron of a transformer block, plain or gated.

- `relu2`: down(relu(up(x))^2), the squared ReLU of Primer (So et al. 2021, arXiv:2109.08668).
- `swiglu`: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202). Three matrices instead of two: at equal
  parameters its hidden width is 2/3 of the plain one's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.nn.linear import Linear

Activation = Literal["relu2", "swiglu"]


class MLP(nn.Module):
    """x: [..., d] -> [..., d].  `down` starts at zero, so that a new block is the identity."""

    def __init__(
        self, d: int, hidden: int, kind: Activation = "relu2", generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        width = 2 * hidden if kind == "swiglu" else hidden
        self.up = Linear(d, width, std=0.6 * d**-0.5, generator=generator)
        self.down = Linear(hidden, d, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.relu(h).square()
        out: Tensor = self.down(h)
        return out
