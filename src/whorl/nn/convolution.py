"""Two-dimensional convolution, its transpose, and resize-convolution for upsampling.

    y[b, o, i, j] = sum over c, u, v of  w[o, c, u, v] x[b, c, s i + u - p, s j + v - p]           stride s, padding p

`conv2d_reference` is the definition: windows times one matrix. `Conv2d` calls torch.

The transpose makes images s times larger. `conv_transpose2d_reference` computes it by zero insertion: s - 1 zeros
between the pixels, then a convolution with the kernel rotated by 180 degrees. An output pixel then uses only the taps
on real pixels, which depend on its position modulo s, the phase. Each of the s^2 phases has a different filter. With
kernel 3 and stride 2 the phases even differ in the number of taps (4, 2, 2 and 1): a checkerboard. A kernel that is a
multiple of the stride has equal counts but different filters (Odena et al. 2016, "Deconvolution and Checkerboard
Artifacts", doi:10.23915/distill.00003).

`ResizeConv` upsamples first and convolves then: one filter for all phases. `checkerboard_energy` measures the
difference: the fraction of the output's energy in a pattern of period s, for a constant input.

Shapes are [B, C, H, W]; weights [c_out, c_in / groups, k, k], and [c_in, c_out / groups, k, k] for the transpose, as in
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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


def conv_transpose2d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    groups: int = 1,
) -> Tensor:
    """Return the transposed convolution, as zero insertion and a convolution with the rotated kernel. -> [B, c_out, H', W'].

    x: [B, c_in, H, W]; weight: [c_in, c_out / groups, k, k];
    H' = (H - 1) stride - 2 padding + k + output_padding. Several H' have the same H under a strided convolution;
    `output_padding` (less than the stride) selects one.
    """
    batch, c_in, height, width = x.shape
    spread = x.new_zeros(batch, c_in, (height - 1) * stride + 1, (width - 1) * stride + 1)
    spread[:, :, ::stride, ::stride] = x
    # Inputs and outputs are exchanged within each group: [g (c_in / g), c_out / g] -> [g (c_out / g), c_in / g].
    _, per_group, kh, kw = weight.shape
    turned = weight.flip(2, 3).view(groups, c_in // groups, per_group, kh, kw).transpose(1, 2).flatten(0, 1)
    left, top = kw - 1 - padding, kh - 1 - padding  # may be negative: F.pad then crops
    padded = F.pad(spread, (left, left + output_padding, top, top + output_padding))
    return conv2d_reference(padded, turned, bias, groups=groups)


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


class ConvTranspose2d(nn.Module):
    """Transposed convolution, exactly `stride` times larger: [B, c_in, H, W] -> [B, c_out, s H, s W].

    Args:
        kernel_size: at least the stride, or some outputs would depend on no input.

    Raises:
        ConfigError: as for `Conv2d`; a kernel smaller than the stride; an even kernel at stride 1.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel_size: int,
        *,
        stride: int = 2,
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check(c_in, c_out, kernel_size, stride, 1)
        if kernel_size < stride:
            raise ConfigError(
                f"kernel_size is {kernel_size}",
                expected=f"at least the stride, {stride}: otherwise some outputs depend on no input",
            )
        if stride == 1 and kernel_size % 2 == 0:
            raise ConfigError(
                f"kernel_size is {kernel_size} at stride 1",
                expected="an odd number, so that the size is kept",
            )
        self.stride = stride
        self.padding = (kernel_size - stride + 1) // 2
        self.output_padding = stride - kernel_size + 2 * self.padding
        taps = c_in * (kernel_size / stride) ** 2  # taps per output, on average
        self.weight = _weight(
            (c_in, c_out, kernel_size, kernel_size), he_std(taps) if std is None else std, generator
        )
        self.bias = nn.Parameter(torch.zeros(c_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        weight = self.weight.to(x.dtype)
        return F.conv_transpose2d(x, weight, bias, self.stride, self.padding, self.output_padding)


class ResizeConv(nn.Module):
    """Upsampling, then a convolution, without a checkerboard: [B, c_in, H, W] -> [B, c_out, s H, s W].

    At kernel 3 and scale 2 it costs four times the products of the transposed convolution.

    Args:
        kernel_size: odd, so that the size is kept. scale: how many times larger. mode: of the upsampling.

    Raises:
        ConfigError: as for `Conv2d`; an even kernel; an unknown mode.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel_size: int = 3,
        *,
        scale: int = 2,
        mode: Literal["nearest", "bilinear"] = "nearest",
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ConfigError(
                f"kernel_size is {kernel_size}", expected="an odd number, so that the size is kept"
            )
        if mode not in ("nearest", "bilinear"):
            raise ConfigError(f"mode is {mode!r}", expected="'nearest' or 'bilinear'")
        if scale < 1:
            raise ConfigError(f"scale is {scale}", expected="at least 1")
        self.scale, self.mode = scale, mode
        self.convolution = Conv2d(c_in, c_out, kernel_size, bias=bias, std=std, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        corners = None if self.mode == "nearest" else False
        larger = F.interpolate(x, scale_factor=float(self.scale), mode=self.mode, align_corners=corners)
        y: Tensor = self.convolution(larger)
        return y


def phase_variance(y: Tensor, period: int) -> Tensor:
    """Return the energy of patterns of period `period` in images y [..., H, W] -> [...], without the constant part.

    It is the variance of the means of the period^2 classes of pixels. By Parseval it equals the power of the spectrum
    at the frequencies (i / period, j / period) except (0, 0), which are those of a checkerboard.

    Raises:
        ConfigError: H or W is not a multiple of the period.
    """
    height, width = y.shape[-2:]
    if period < 1 or height % period or width % period:
        raise ConfigError(
            f"images are {height} x {width} and the period is {period}", expected="multiples of the period"
        )
    cells = y.reshape(*y.shape[:-2], height // period, period, width // period, period)
    phases = cells.mean((-4, -2))  # [..., period, period]
    return phases.flatten(-2).var(-1, correction=0)


@torch.no_grad()
def checkerboard_energy(
    layer: Callable[[Tensor], Tensor],
    c_in: int,
    scale: int,
    *,
    n_samples: int = 16,
    size: int = 12,
    margin: int = 2,
    generator: torch.Generator | None = None,
) -> float:
    """Return the fraction of output energy in patterns of period `scale` for constant inputs: 0 is none, 1 all.

    Args:
        layer: [B, c_in, size, size] -> [B, c, scale size, scale size].
        n_samples: constant inputs, of random values per channel.
        margin: input pixels at each border whose outputs are left out, because they depend on the padding.
    """
    values = torch.randn(n_samples, c_in, 1, 1, generator=generator)
    y = layer(values.expand(-1, -1, size, size).contiguous()).float()
    edge = margin * scale
    y = y[..., edge:-edge, edge:-edge]
    return float(phase_variance(y, scale).sum() / y.square().mean((-2, -1)).sum().clamp_min(1e-30))


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
