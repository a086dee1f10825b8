"""Normalization layers.

- `RMSNorm` (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4): y = x / sqrt(mean(x^2) + eps) * gain, over the features.
- `LayerNorm` (Ba et al. 2016, arXiv:1607.06450, eq. 4): y = (x - mean) / sqrt(variance + eps) * gain + bias, over the
  features of each position.
- `GroupNorm` (Wu & He 2018, arXiv:1803.08494, eq. 7): the same over groups of channels and all places of an image.
- `BatchNorm` (Ioffe & Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2): the same over rows and places, for each
  channel. An example's output depends on its batch; evaluation uses running statistics.

Statistics are computed in fp32 for any type of x: in bf16, a sum of hundreds of squares would drift. The variance is
the mean of squared deviations; E[x^2] - E[x]^2 would lose all digits where the mean is large. The result is cast to
the type of x after gain and bias.

The subtle part of `BatchNorm`: it normalizes by the biased variance (1 / n) and stores the unbiased one (1 / (n - 1)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.nn.gpu import dispatch

EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Return x / rms(x) * gain, in the shape and dtype of x.

    x: [..., d]; gain: [d], [heads, 1] (x: [..., heads, d]) or None for 1.

    On a GPU it runs a Triton kernel where one was selected (`nn/gpu/autotune.py`), elsewhere `rms_norm_reference`.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        return dispatch.rms_norm(x, gain, eps, rms_norm_reference)
    return rms_norm_reference(x, gain, eps)


def rms_norm_reference(x: Tensor, gain: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Return the RMS norm by the definition, in fp32. Shapes as in `rms_norm`."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (y if gain is None else y * gain).to(x.dtype)


def layer_norm(
    x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the layer norm of x [..., d], same shape and dtype. gain, bias: [d], or None for 1 and 0."""
    deviation, variance = _moments(x.float(), (-1,))[1:]
    y = deviation * torch.rsqrt(variance + eps)
    y = y if gain is None else y * gain
    return (y if bias is None else y + bias).to(x.dtype)


class QKNorm(NamedTuple):
    """Norm of queries and keys: over each head's features, or over all heads. offset: 1.0 for gains 1 + w, as in Gemma."""

    eps: float
    offset: float = 0.0
    all_heads: bool = False


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain, initialized to 1. x: [..., d].

    Args:
        d: width.
        eps: added to the mean square.
        offset: the gain is offset + weight. With 1 (Gemma) the weight starts at 0, so that weight decay pulls the gain
            towards 1 instead of 0.
    """

    def __init__(self, d: int, eps: float = EPS, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((d,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + self.offset if self.offset else self.weight
        return rms_norm(x, gain, self.eps)


class LayerNorm(nn.Module):
    """`layer_norm` with a learned gain (from 1) and bias (from 0). x: [..., d].

    Args:
        d: width.
        eps: added to the variance.
        bias: False leaves the bias out; the mean is still subtracted.
    """

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class GroupNorm(nn.Module):
    """Group norm: each group of adjacent channels of each row gets mean 0 and variance 1. x: [B, channels, ...], same out.

    One group is a layer norm over channels and places; `channels` groups is instance normalization.

    Raises:
        ConfigError: `groups` does not divide `channels`; in `forward`, x has other channels.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        if groups < 1 or channels % groups:
            raise ConfigError(
                f"groups is {groups} and channels is {channels}", expected="channels a multiple of groups"
            )
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        _check_channels(x, len(self.weight))
        grouped = x.float().reshape(x.shape[0], self.groups, -1)  # [B, groups, channels / groups * places]
        deviation, variance = _moments(grouped, (-1,))[1:]
        y = (deviation * torch.rsqrt(variance + self.eps)).view(x.shape)
        return (y * _broadcast_channels(self.weight, x) + _broadcast_channels(self.bias, x)).to(x.dtype)


class BatchNorm(nn.Module):
    """Batch norm: each channel gets mean 0 and variance 1 over rows and places. x: [B, channels, ...], same shape out.

    Training uses the statistics of the batch and updates the running ones:
    running = (1 - momentum) * running + momentum * batch. Evaluation uses the running ones unchanged.
    Statistics are per process: data-parallel ranks do not exchange them. Parameters and buffers have torch's names, so
    that its checkpoints load.

    Args:
        channels: of x.
        eps: added to the variance.
        momentum: weight of the newest batch; None for the average of all batches.

    Raises:
        ConfigError: in `forward`: x has other channels, or one value per channel in training, which has no variance.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))  # gamma
        self.bias = nn.Parameter(torch.zeros(channels))  # beta
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        _check_channels(x, len(self.weight))
        x32 = x.float()
        if self.training:
            mean, deviation, variance = _moments(x32, (0, *range(2, x.ndim)))
            self._update_running_stats(mean, variance, x.numel() // len(self.weight))
        else:
            deviation, variance = (
                x32 - _broadcast_channels(self.running_mean, x),
                _broadcast_channels(self.running_var, x),
            )
        y = deviation * torch.rsqrt(variance + self.eps)
        return (y * _broadcast_channels(self.weight, x) + _broadcast_channels(self.bias, x)).to(x.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics. mean, variance (biased): [1, channels, 1...] over `count` values per channel."""
        if count < 2:
            raise ConfigError(
                f"a batch in training has {count} value per channel",
                expected="at least 2: one value has no variance",
                do="make the batch larger, drop the last incomplete one, or call eval()",
            )
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.add_(momentum * (batch.flatten() - running))


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, deviations and biased variance over `dims`, which are kept with size 1."""
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    return mean, deviation, deviation.square().mean(dims, keepdim=True)


def _broadcast_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return values [channels] as [1, channels, 1, ...], which broadcasts over x [B, channels, ...]."""
    return values.view(1, -1, *[1] * (x.ndim - 2))


def _check_channels(x: Tensor, channels: int) -> None:
    if x.ndim < 2 or x.shape[1] != channels:
        raise ConfigError(f"x has shape {list(x.shape)}", expected=f"[B, {channels}, ...]")
