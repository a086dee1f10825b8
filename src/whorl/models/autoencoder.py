"""Encoders and decoders of vectors and images.

    vectors    h = W x + class[label];  h += down(silu(up(silu(h))))   depth times;   W h
    images     convolutions that halve the sides, depth residual blocks (van den Oord et al. 2017, arXiv:1711.00937, section
               4.1), a linear map; a decoder has the same in reverse, with resize-convolutions against a checkerboard

The linear map reads the whole grid for one latent, or each position for a grid of latents. Class number `n_classes` means
"no class", as in `vector_denoiser.py`. The halvings leave a grid of 4 x 4 or more: 8 x 8 images are halved once, images of
16 or more twice. The width doubles with each halving, up to that of the grid.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.vision.vit import check_images
from whorl.nn.convolution import Conv2d, ResizeConv
from whorl.nn.linear import Linear

# At 1 the prior outweighs an untrained decoder, and on 8 Gaussians the posterior collapses to it.
FIRST_LOG_STD = -1.5


class ClassEmbedding(nn.Module):
    """Map classes [B], or None for no class, to vectors [B or 1, width]; without classes to zeros."""

    def __init__(self, n_classes: int, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.n_classes = n_classes
        table = torch.randn(n_classes + 1, width, generator=generator) * 0.5
        self.table = nn.Parameter(table) if n_classes else None
        self.zeros: Tensor
        self.register_buffer("zeros", torch.zeros(1, width), persistent=False)

    def forward(self, labels: Tensor | None = None) -> Tensor:
        if self.table is None:
            return self.zeros
        return self.table[self.n_classes :] if labels is None else F.embedding(labels, self.table)


class VectorCoder(nn.Module):
    """Map vectors [B, ...], flattened to [B, d_in], and classes to [B, d_out]. At depth 0 it is linear."""

    def __init__(
        self, d_in: int, d_out: int, width: int, depth: int, n_classes: int = 0, rng: torch.Generator | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        std = width**-0.5
        self.first = Linear(d_in, width, std=d_in**-0.5, bias=True, generator=rng)
        self.classes = ClassEmbedding(n_classes, width, rng)
        self.up = nn.ModuleList(
            [Linear(width, width, std=std, bias=True, generator=rng) for _ in range(depth)]
        )
        self.down = nn.ModuleList([Linear(width, width, std=0.0, bias=True) for _ in range(depth)])
        self.last = Linear(width, d_out, std=std / 2, bias=True, generator=rng)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.first(x.flatten(1)) + self.classes(labels)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(F.silu(up(F.silu(h))))
        out: Tensor = self.last(h)
        return out


class ResidualConv(nn.Module):
    """x + convolution of 1 x 1 (silu(convolution of 3 x 3 (silu(x)))): [B, width, H, W] -> the same."""

    def __init__(self, width: int, rng: torch.Generator | None) -> None:
        super().__init__()
        self.up = Conv2d(width, width, 3, bias=True, generator=rng)
        self.down = Conv2d(width, width, 1, bias=True, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(F.silu(x))))
        return out


def grid_side(size: int) -> int:
    """Return the side of the grid of images of side `size`. Raises ConfigError: not a multiple of 4, or below 8."""
    if size % 4 or size < 8:
        raise ConfigError(
            f"images are {size} x {size}", expected="a side that is a multiple of 4, at least 8",
            do="resize the images",
        )  # fmt: skip
    return size // 2 if size < 16 else size // 4


def _widths(size: int, width: int) -> list[int]:
    """Return the widths from the image to the grid."""
    halvings = (size // grid_side(size)).bit_length() - 1
    return [max(8, width >> (halvings - k)) for k in range(halvings)] + [width]


class ImageEncoder(nn.Module):
    """Map images [B, C, size, size] and classes to one latent [B, d_out], or with `grid` to [B, positions, d_out]."""

    def __init__(
        self, size: int, channels: int, d_out: int, width: int, depth: int, *, grid: bool, n_classes: int = 0,
        rng: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channels, self.grid, widths = channels, grid, _widths(size, width)
        self.first = Conv2d(channels, widths[0], 3, bias=True, generator=rng)
        self.downsample = nn.ModuleList(
            [Conv2d(a, b, 3, stride=2, bias=True, generator=rng) for a, b in pairwise(widths)]
        )
        self.classes = ClassEmbedding(n_classes, width, rng)
        self.blocks = nn.ModuleList([ResidualConv(width, rng) for _ in range(depth)])
        d_in = width if grid else width * grid_side(size) ** 2
        self.last = Linear(d_in, d_out, std=d_in**-0.5 / 2, bias=True, generator=rng)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        check_images(x, self.channels)
        h = self.first(x)
        for downsample in self.downsample:
            h = downsample(F.silu(h))
        h = h + self.classes(labels)[:, :, None, None]
        for block in self.blocks:
            h = block(h)
        positions = F.silu(h).flatten(2).transpose(1, 2)  # [B, positions, width]
        out: Tensor = self.last(positions if self.grid else positions.flatten(1))
        return out


class ImageDecoder(nn.Module):
    """Map latents of the encoder's shape, and classes, to images [B, C, size, size]."""

    def __init__(
        self, size: int, channels: int, d_in: int, width: int, depth: int, *, grid: bool, n_classes: int = 0,
        rng: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.side, widths = grid_side(size), _widths(size, width)[::-1]
        d_out = width if grid else width * self.side**2
        self.first = Linear(d_in, d_out, std=d_in**-0.5, bias=True, generator=rng)
        self.classes = ClassEmbedding(n_classes, d_out, rng)  # of one latent: its own vector at each position
        self.blocks = nn.ModuleList([ResidualConv(width, rng) for _ in range(depth)])
        self.upsample = nn.ModuleList(
            [ResizeConv(a, b, bias=True, generator=rng) for a, b in pairwise(widths)]
        )
        self.last = Conv2d(
            widths[-1], channels, 3, bias=True, std=(9 * widths[-1]) ** -0.5 / 2, generator=rng
        )

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        rows = self.first(z) + self.classes(labels).unflatten(1, (*[1] * (z.ndim - 2), -1))
        h = rows.view(len(z), self.side, self.side, -1).permute(0, 3, 1, 2)
        for block in self.blocks:
            h = block(h)
        for upsample in self.upsample:
            h = upsample(F.silu(h))
        out: Tensor = self.last(F.silu(h))
        return out


def make_coders(
    shape: tuple[int, ...], d_out: int, d_in: int, width: int, depth: int, *, grid: bool = False, n_classes: int = 0,
    rng: torch.Generator | None = None,
) -> tuple[nn.Module, nn.Module]:  # fmt: skip
    """Return an encoder to `d_out` numbers and a decoder of `d_in`, for vectors (d,) or images (C, size, size).

    Args:
        grid: d_out and d_in are those of a position (`n_positions`) in place of the whole.

    Raises:
        ConfigError: a side that does not fit (`grid_side`).
    """
    if len(shape) == 1:
        positions = n_positions(shape) if grid else 1
        return (
            VectorCoder(shape[0], positions * d_out, width, depth, n_classes, rng),
            VectorCoder(positions * d_in, shape[0], width, depth, n_classes, rng),
        )
    channels, size, _ = shape
    return (
        ImageEncoder(size, channels, d_out, width, depth, grid=grid, n_classes=n_classes, rng=rng),
        ImageDecoder(size, channels, d_in, width, depth, grid=grid, n_classes=n_classes, rng=rng),
    )


def n_positions(shape: tuple[int, ...]) -> int:
    """Return the number of latents in a grid: the cells of an image, or one per dimension of a vector."""
    return shape[0] if len(shape) == 1 else grid_side(shape[1]) ** 2


class Autoencoder(nn.Module):
    """An encoder, a decoder, and with `log_std` the log-deviation of a Gaussian around the decoder's mean."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, log_std: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.log_std = nn.Parameter(torch.full((1,), FIRST_LOG_STD)) if log_std else None

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device
