"""Two-dimensional convolution.

    y[b, o, i, j] = sum over c, u, v of  w[o, c, u, v] x[b, c, s i + u - p, s j + v - p]           stride s, padding p

`conv2d_reference` is the definition: windows times one matrix. `Conv2d` calls torch. Shapes are [B, C, H, W], and weights
[c_out, c_in / groups, k, k].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError


def conv2d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Tensor:
    """Return the convolution by the definition, [B, c_out, H', W']: all windows, times the kernels as one matrix.

    x: [B, c_in, H, W]; weight: [c_out, c_in / groups, kh, kw]; bias: [c_out];
    H' = (H + 2 padding - kh) // stride + 1. Group g of the outputs uses group g of the inputs.
    """
    c_out, per_group, kh, kw = weight.shape
    padded = F.pad(x, (padding,) * 4)
    windows = padded.unfold(2, kh, stride).unfold(3, kw, stride)  # [B, c_in, H', W', kh, kw], a view
    windows = windows.view(len(x), groups, per_group, *windows.shape[2:])
    kernels = weight.view(groups, c_out // groups, per_group, kh, kw)
    y = torch.einsum("bgchwuv,gocuv->bgohw", windows, kernels).flatten(1, 2)
    return y if bias is None else y + bias[:, None, None]


def he_std(fan_in: float) -> float:
    """Return the std that keeps activations' size before a ReLU (He et al. 2015, arXiv:1502.01852, eq. 10)."""
    return float((2.0 / fan_in) ** 0.5)


class Conv2d(nn.Module):
    """Convolution with an fp32 weight: x [B, c_in, H, W] -> [B, c_out, H', W'].

    Args:
        padding: by default half of the kernel, which keeps H and W at stride 1 (for an odd kernel).
        groups: c_in groups make a depthwise convolution.
        std: of the initial weights, by default `he_std`; 0 for a layer whose first output is 0.

    Raises:
        ConfigError: a size is not positive, or the channels do not divide into the groups.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check(c_in, c_out, kernel_size, stride, groups)
        self.stride, self.groups, self.kernel_size = stride, groups, kernel_size
        self.padding = kernel_size // 2 if padding is None else padding
        fan_in = c_in // groups * kernel_size**2
        std = he_std(fan_in) if std is None else std
        self.weight = _weight((c_out, c_in // groups, kernel_size, kernel_size), std, generator)
        self.bias = nn.Parameter(torch.zeros(c_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        weight = self.weight.to(x.dtype)
        return F.conv2d(x, weight, bias, self.stride, self.padding, groups=self.groups)

    def output_size(self, size: int) -> int:
        """Return the side of the output for an input of side `size`."""
        return (size + 2 * self.padding - self.kernel_size) // self.stride + 1

    def flops(self, size: int) -> float:
        """Return the FLOPs for one image of side `size`; a multiplication and an addition count as two."""
        return 2.0 * self.weight.numel() * self.output_size(size) ** 2


def _weight(shape: tuple[int, ...], std: float, generator: torch.Generator | None) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * std if std else torch.zeros(shape))


def _check(c_in: int, c_out: int, kernel: int, stride: int, groups: int) -> None:
    sizes = {"c_in": c_in, "c_out": c_out, "kernel": kernel, "stride": stride, "groups": groups}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", expected="at least 1")
    if c_in % groups or c_out % groups:
        raise ConfigError(
            f"groups is {groups}", expected=f"a divisor of the channels, {c_in} in and {c_out} out"
        )
