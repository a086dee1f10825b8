"""Images as rows of tokens: square patches, one vector each (Dosovitskiy et al. 2020, arXiv:2010.11929, eq. 1).

    images [B, C, H, W]  ->  patches [B, N, C p p]  ->  tokens [B, N, d],       N = (H / p) (W / p), row by row

Cutting is an exact reshape. With the linear map after it, it equals a convolution with kernel p and stride p (tested).
Here it is one matrix product by `Linear`. A patch is laid out channel by channel, as the kernel of that convolution,
so published weights need a reshape only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.linear import Linear


def patch_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """Return (rows, columns) of patches.

    Raises:
        ConfigError: the patch does not divide the image.
    """
    if patch < 1 or height < patch or width < patch or height % patch or width % patch:
        raise ConfigError(
            f"patch is {patch} and the image {height} x {width}",
            expected="a patch that divides both sides",
            do="resize or pad the images",
        )
    return height // patch, width // patch


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Return patches [B, N, C patch patch] of images [B, C, H, W], row by row.

    Raises:
        ConfigError: the patch does not divide the image, or the images are not [B, C, H, W].
    """
    if images.ndim != 4:
        raise ConfigError(f"images are {list(images.shape)}", expected="[batch, channels, height, width]")
    rows, columns = patch_grid(images.shape[2], images.shape[3], patch)
    cut = images.reshape(*images.shape[:2], rows, patch, columns, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return images [B, C, H, W] of patches [B, N, C patch patch]; the inverse of `to_patches`. grid: its rows, columns."""
    cut = patches.reshape(len(patches), *grid, -1, patch, patch)
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class PatchEmbedding(nn.Module):
    """Patch embedding: images [B, C, H, W] -> tokens [B, N, d].

    Args:
        channels: C. patch: side of a patch in pixels. d: width of a token. bias: whether the map has one.

    Raises:
        ConfigError: a size is not positive; when called, the patch does not divide the image.
    """

    def __init__(
        self,
        channels: int,
        patch: int,
        d: int,
        *,
        bias: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"channels": channels, "patch": patch, "d": d}.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="at least 1")
        self.channels, self.patch = channels, patch
        pixels = channels * patch**2
        self.linear = Linear(pixels, d, std=pixels**-0.5, bias=bias, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim == 4 and images.shape[1] != self.channels:
            raise ConfigError(
                f"images have {images.shape[1]} channels", expected=f"channels = {self.channels}"
            )
        tokens: Tensor = self.linear(to_patches(images, self.patch))
        return tokens
