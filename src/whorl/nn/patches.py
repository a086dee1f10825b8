"""Images as rows of tokens: square patches, each one vector (Dosovitskiy et al. 2020, arXiv:2010.11929, eq. 1).

    images [B, C, H, W]  ->  patches [B, N, C p p]  ->  tokens [B, N, d],       N = (H / p) (W / p), row by row

Cutting is a reshape, and exact both ways. The linear map behind it is the same for every patch, which makes the two together
a convolution with kernel p and stride p (a test). Written as a product it is one large matrix product, and it is the same
`Linear` as everywhere else. A patch is laid out channel by channel, as in the kernel of that convolution, so its weights are
a reshape of those of other people's models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.linear import Linear


def patch_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """(rows, columns) of patches.

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
    """[B, C, H, W] -> [B, N, C patch patch], row by row.

    Raises:
        ConfigError: the patch does not divide the image, or the images are not [B, C, H, W].
    """
    if images.ndim != 4:
        raise ConfigError(f"images are {list(images.shape)}", expected="[batch, channels, height, width]")
    rows, columns = patch_grid(images.shape[2], images.shape[3], patch)
    cut = images.reshape(*images.shape[:2], rows, patch, columns, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, patch: int, height: int, width: int) -> Tensor:
    """The inverse of `to_patches`: [B, N, C patch patch] -> [B, C, height, width].

    Raises:
        ConfigError: the patches do not make up an image of that size.
    """
    rows, columns = patch_grid(height, width, patch)
    if patches.ndim != 3 or patches.shape[1] != rows * columns or patches.shape[2] % patch**2:
        raise ConfigError(
            f"patches are {list(patches.shape)}",
            expected=f"[batch, {rows * columns}, channels x {patch**2}] for an image of {height} x {width}",
        )
    cut = patches.reshape(len(patches), rows, columns, -1, patch, patch)
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class PatchEmbedding(nn.Module):
    """Images [B, C, H, W] -> tokens [B, N, d].

    Args:
        channels: C. patch: side of a patch in pixels. d: width of a token. bias: of the map.

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
