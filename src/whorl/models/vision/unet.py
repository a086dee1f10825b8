"""U-Net: convolutions at falling and rising resolution, with skips between equal sides (Ho et al. 2020, arXiv:2006.11239).

    c = time + class                                                    `models/vector_denoiser.py`
    down      h = block(h, c), kept as a skip;  then a convolution of stride 2
    middle    block, attention over all places, block
    up        h = block([h, skip], c);  then resize-convolution (`nn/convolution.py`)

    block     x + conv(silu(norm(conv(silu(norm(x))) + W silu(c))))     appendix B of the paper; norm: group norm

The last convolution of each branch starts at 0, so each block starts as its shortcut. The first level has `width`
channels, the others twice as many. There are no positions: convolutions find the borders by their padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.vector_denoiser import Condition
from whorl.models.vision.vit import check_images
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.convolution import Conv2d, ResizeConv
from whorl.nn.linear import Linear
from whorl.nn.norm import GroupNorm

GROUPS = 8


class ResidualBlock(nn.Module):
    """Two convolutions with the condition between them: x [B, c_in, H, W], c [B, d] -> [B, c_out, H, W]."""

    def __init__(self, c_in: int, c_out: int, d: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = GroupNorm(GROUPS, c_in), GroupNorm(GROUPS, c_out)
        self.convolution1 = Conv2d(c_in, c_out, 3, bias=True, generator=generator)
        self.convolution2 = Conv2d(c_out, c_out, 3, bias=True, std=0.0)
        self.condition = Linear(d, c_out, std=d**-0.5, generator=generator)
        std = c_in**-0.5
        self.shortcut = (
            Conv2d(c_in, c_out, 1, std=std, generator=generator) if c_in != c_out else nn.Identity()
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        h = self.convolution1(F.silu(self.norm1(x))) + self.condition(F.silu(c))[:, :, None, None]
        out: Tensor = self.shortcut(x) + self.convolution2(F.silu(self.norm2(h)))
        return out


class SpatialAttention(nn.Module):
    """x + attention over the places of norm(x), [B, C, H, W]; its first output is x."""

    def __init__(self, channels: int, n_heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.norm = GroupNorm(GROUPS, channels)
        self.attention = MultiHeadAttention(
            channels, n_heads, bias=True, out_bias=True, causal=False, generator=generator
        )

    def forward(self, x: Tensor) -> Tensor:
        places = self.norm(x).flatten(2).transpose(1, 2)  # [B, H W, C]
        out: Tensor = x + self.attention(places).transpose(1, 2).reshape(x.shape)
        return out


class UNet(nn.Module):
    """Map images [B, C, H, W], times [B] and classes [B] to [B, C, H, W]. The first output is 0.

    Args:
        size: H and W, a multiple of 2^(depth - 1). width: channels of the first level. depth: levels.
        n_heads: of the attention at the lowest level. n_classes: 0 for no classes.

    Raises:
        ConfigError: sizes that do not fit.
    """

    def __init__(
        self, size: int, channels: int, *, width: int = 128, depth: int = 3, n_heads: int = 4, n_classes: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if size % 2 ** (depth - 1):
            raise ConfigError(
                f"pictures have side {size}", expected=f"a multiple of {2 ** (depth - 1)}",
                do="lower depth: each level but the last halves the side",
            )  # fmt: skip
        if width % GROUPS or width % n_heads:
            raise ConfigError(
                f"width is {width}", expected=f"a multiple of {GROUPS} and of n_heads, {n_heads}"
            )
        self.channels = channels
        self.condition = Condition(width, n_classes, generator)
        self.first = Conv2d(channels, width, 3, bias=True, generator=generator)
        widths = [width, *[2 * width] * (depth - 1)]

        def block(c_in: int, c_out: int) -> ResidualBlock:
            return ResidualBlock(c_in, c_out, width, generator)

        self.down = nn.ModuleList([block(a, b) for a, b in zip([width, *widths], widths, strict=False)])
        self.smaller = nn.ModuleList(
            [Conv2d(w, w, 3, stride=2, bias=True, generator=generator) for w in widths[:-1]]
        )
        self.middle = nn.ModuleList([block(widths[-1], widths[-1]) for _ in range(2)])
        self.attention = SpatialAttention(widths[-1], n_heads, generator)
        below = [widths[-1], *widths[:0:-1]]
        self.up = nn.ModuleList([block(a + b, b) for a, b in zip(below, reversed(widths), strict=True)])
        self.larger = nn.ModuleList([ResizeConv(w, w, bias=True, generator=generator) for w in widths[:0:-1]])
        self.norm = GroupNorm(GROUPS, width)
        self.last = Conv2d(width, channels, 3, bias=True, std=0.0)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        check_images(x, self.channels)
        c = self.condition(time, labels)
        h, skips = self.first(x), []
        for number, block in enumerate(self.down):
            h = block(h, c)
            skips.append(h)
            if number < len(self.smaller):
                h = self.smaller[number](h)
        h = self.middle[1](self.attention(self.middle[0](h, c)), c)
        for number, block in enumerate(self.up):
            h = block(torch.cat([h, skips.pop()], dim=1), c)
            if number < len(self.larger):
                h = self.larger[number](h)
        out: Tensor = self.last(F.silu(self.norm(h)))
        return out
