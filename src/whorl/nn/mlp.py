"""The MLP of a transformer block, plain or gated.

- `relu2`: down(relu(up(x))^2), the squared ReLU of Primer (So et al. 2021, arXiv:2109.08668).
- `gelu`: down(gelu(up(x))), gelu(x) = x * Phi(x), with Phi the normal distribution's CDF (Hendrycks & Gimpel 2016,
  arXiv:1606.08415): BERT, ViT.
- `gelu_tanh`: its tanh approximation (sec. 2 there): GPT-2. The two differ by up to 5e-4.
- `quick_gelu`: x * sigmoid(1.702 x) (ibid.), off by up to 0.02: CLIP's published weights. It is computed as
  silu(1.702 x) / 1.702, which keeps one tensor for the backward pass.
- `swiglu`: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202, eq. 6): Llama. It has three matrices; at equal
  parameters its hidden width is 2/3 of the plain one's.
- `geglu`: down(gelu_tanh(gate(x)) * up(x)) (ibid.): Gemma.

The gate and the up projection of a gated kind are one matrix, `up`, gate first: one product computes both.

`choose_path` may select a C++ kernel of `relu2` for one shape and type (`nn/cpu/mlp.py`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of
from whorl.nn.cpu import mlp as native
from whorl.nn.linear import Linear

Activation = Literal["relu2", "swiglu", "gelu", "gelu_tanh", "quick_gelu", "geglu"]
GATED = ("swiglu", "geglu")


def up_width(hidden: int, kind: Activation) -> int:
    """Return the output width of the up projection, which is doubled by a gate.

    Raises:
        ConfigError: `kind` is unknown.
    """
    if kind not in get_args(Activation):
        raise ConfigError(f"mlp kind is {kind!r}", expected=one_of(kind, get_args(Activation)))
    return 2 * hidden if kind in GATED else hidden


def activate(h: Tensor, kind: Activation) -> Tensor:
    """Return the activations [..., hidden] of h [..., up_width(hidden, kind)], where a gate comes first."""
    if kind in GATED:
        gate, h = h.chunk(2, dim=-1)
        return (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * h
    if kind == "relu2":
        return F.relu(h).square()
    if kind == "quick_gelu":
        return F.silu(1.702 * h) / 1.702
    return F.gelu(h, approximate="tanh" if kind == "gelu_tanh" else "none")


class MLP(nn.Module):
    """Two-layer MLP: x [..., d] -> [..., d]. `down` starts at zero, so that a new block is the identity.

    Args:
        d, hidden: widths outside and inside.
        kind: see above.
        generator: of the initial weights.
        bias: of both layers, from 0.

    Raises:
        ConfigError: `kind` is unknown.
    """

    def __init__(
        self,
        d: int,
        hidden: int,
        kind: Activation = "relu2",
        generator: torch.Generator | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kind = kind
        width = up_width(hidden, kind)
        self.up = Linear(d, width, std=0.6 * d**-0.5, bias=bias, generator=generator)
        self.down = Linear(hidden, d, std=0.0, bias=bias)

    @property
    def is_plain_relu2(self) -> bool:
        """Whether the C++ kernel can compute it: squared ReLU between two plain matrices without biases and hooks (LoRA)."""
        return self.kind == "relu2" and all(
            type(layer) is Linear
            and layer.bias is None
            and layer.matmul is None
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in (self.up, self.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain_relu2 and native.is_chosen(x, self.up.weight):
            return native.mlp(x, self.up.weight, self.down.weight)
        out: Tensor = self.down(activate(self.up(x), self.kind))
        return out


def choose_path(rows: int, d: int, hidden: int, dtype: torch.dtype) -> str:
    """Time the paths of a `relu2` MLP without biases for [rows, d] of bf16 or fp32 on a CPU; `MLP` takes the fastest.

    Call it before the step is compiled. Returns "torch" or "native".
    """

    def reference(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(activate(F.linear(x, up.to(x.dtype)), "relu2"), down.to(x.dtype))

    return native.choose_mlp(rows, d, hidden, dtype, reference)
