"""DiT: a transformer over patches of a noisy image, conditioned on time and class (Peebles & Xie 2023, arXiv:2212.09748).

    c = time + class                                                    `models/vector_denoiser.py`
    x += gate_1 attention(norm(x) (1 + scale_1) + shift_1);  x += gate_2 mlp(norm(x) (1 + scale_2) + shift_2)
    out = W (norm(x) (1 + scale) + shift), as patches

Shifts, scales and gates are linear in silu(c) and start at 0 (adaLN-Zero, section 3.2), so each block starts as the
identity. The norms have no gain and no bias. Positions are learned, as in `models/vision/vit.py`; the paper's are fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.vector_denoiser import Condition
from whorl.models.vision.vit import LAYER_NORM_EPS, POSITION_STD, check_images
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP
from whorl.nn.norm import layer_norm
from whorl.nn.patches import PatchEmbedding, from_patches, patch_grid


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return norm(x) (1 + scale) + shift.  x: [B, N, d]; shift, scale: [B, 1, d]."""
    return layer_norm(x, eps=LAYER_NORM_EPS) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """Attention and MLP with modulated norms and gates: x [B, N, d], c [B, d] -> [B, N, d]."""

    def __init__(self, d: int, n_heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            d, n_heads, bias=True, out_bias=True, causal=False, generator=generator
        )
        self.mlp = MLP(d, 4 * d, "gelu_tanh", generator, bias=True)
        self.modulation = Linear(d, 6 * d, std=0.0, bias=True)
        with torch.no_grad():  # the gates are 0: with these at 0, too, no gradient would reach either
            for layer in (self.attention.out, self.mlp.down):
                layer.weight.normal_(0.0, 0.6 * layer.weight.shape[1] ** -0.5, generator=generator)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(modulate(x, shift1, scale1))
        out: Tensor = x + gate2 * self.mlp(modulate(x, shift2, scale2))
        return out


class DiT(nn.Module):
    """Map images [B, C, H, W], times [B] and classes [B] to [B, C, H, W]. The first output is 0.

    Args:
        size: H and W. patch: a divisor of it. n_classes: 0 for no classes.

    Raises:
        ConfigError: sizes that do not fit.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        *,
        patch: int = 2,
        width: int = 128,
        depth: int = 4,
        n_heads: int = 4,
        n_classes: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if width % n_heads or width % 2:
            raise ConfigError(f"width is {width}", expected=f"an even multiple of n_heads, {n_heads}")
        self.grid, self.patch, self.channels = patch_grid(size, size, patch), patch, channels
        self.condition = Condition(width, n_classes, generator)
        self.embedding = PatchEmbedding(channels, patch, width, generator=generator)
        n_patches = self.grid[0] * self.grid[1]
        self.positions = nn.Parameter(torch.randn(n_patches, width, generator=generator) * POSITION_STD)
        self.blocks = nn.ModuleList([DiTBlock(width, n_heads, generator) for _ in range(depth)])
        self.modulation = Linear(width, 2 * width, std=0.0, bias=True)
        self.last = Linear(width, channels * patch**2, std=0.0, bias=True)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        check_images(x, self.channels)
        c = self.condition(time, labels)
        h = self.embedding(x) + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, dim=-1)
        return from_patches(self.last(modulate(h, shift, scale)), self.grid, self.patch)
