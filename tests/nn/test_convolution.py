"""Convolutions against their definitions and torch; patches; the checkerboard measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn import convolution
from whorl.nn.convolution import Conv2d, ConvTranspose2d, ResizeConv
from whorl.nn.patches import PatchEmbedding, from_patches, to_patches


def weights(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and the bias of 12 channels."""
    return randn(*shape, seed=1, grad=True), randn(12, seed=2, grad=True)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("stride, padding, groups", [(1, 0, 1), (1, 1, 3), (2, 1, 1), (3, 2, 2), (2, 0, 6)])
def test_conv2d_reference_matches_torch(kernel: Any, stride: int, padding: int, groups: int) -> None:
    x, (weight, bias) = randn(2, 6, 9, 8, grad=True), weights(12, 6 // groups, *kernel)
    settings = {"stride": stride, "padding": padding, "groups": groups}
    ours, want = (f(x, weight, bias, **settings) for f in (convolution.conv2d_reference, F.conv2d))
    assert_same_with_gradients(ours, want, [x, weight, bias])


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("stride, padding, groups", [(1, 0, 1), (1, 1, 3), (2, 1, 1), (3, 2, 2)])
def test_conv_transpose2d_reference_matches_torch(
    kernel: Any, stride: int, padding: int, groups: int
) -> None:
    x, (weight, bias) = randn(2, 6, 5, 4, grad=True), weights(6, 12 // groups, *kernel)
    extra = min(padding, stride - 1)
    settings = {"stride": stride, "padding": padding, "output_padding": extra, "groups": groups}
    ours, want = (
        f(x, weight, bias, **settings) for f in (convolution.conv_transpose2d_reference, F.conv_transpose2d)
    )
    assert_same_with_gradients(ours, want, [x, weight, bias])


@pytest.mark.parametrize(("kernel", "stride", "groups"), [(3, 1, 1), (3, 2, 2), (1, 2, 1), (5, 1, 4)])
def test_conv2d_matches_reference_and_counts_flops(kernel: int, stride: int, groups: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = Conv2d(4, 8, kernel, stride=stride, groups=groups, bias=True, generator=gen())
    torch.nn.init.normal_(layer.bias, generator=gen(1))
    x = randn(1, 4, 8, 8, seed=2, grad=True)
    want = convolution.conv2d_reference(
        x, layer.weight, layer.bias, stride=stride, padding=kernel // 2, groups=groups
    )
    assert_same_with_gradients(layer(x), want, [x, layer.weight, layer.bias])
    assert layer.output_size(8) == want.shape[-1]
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == layer.flops(8)
    low = layer(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), want, atol=0.1, rtol=0.1)


def test_initial_weights_keep_activation_size() -> None:
    layer = Conv2d(32, 64, 3, generator=gen())
    assert torch.equal(layer.weight, Conv2d(32, 64, 3, generator=gen()).weight)
    assert not Conv2d(3, 3, 3, std=0).weight.any()
    x = randn(4, 32, 16, 16, seed=1)
    for made in (layer, *(ConvTranspose2d(32, 64, kernel, generator=gen()) for kernel in (2, 3, 4))):
        inside = made(x)[..., 2:-2, 2:-2].relu()
        assert float(inside.detach().square().mean()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    "stride, more", [(1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (4, 3)]
)
def test_upsampling_layers_scale_by_the_stride(stride: int, more: int) -> None:
    x = randn(1, 2, 5, 4)
    layer = ConvTranspose2d(2, 3, stride + more, stride=stride, bias=True, generator=gen(1))
    assert layer(x).shape == (1, 3, 5 * stride, 4 * stride)
    settings = {"stride": stride, "padding": layer.padding, "output_padding": layer.output_padding}
    assert_close(layer(x), convolution.conv_transpose2d_reference(x, layer.weight, layer.bias, **settings))
    assert ResizeConv(2, 3, 3, scale=stride, generator=gen(1))(x).shape == (1, 3, 5 * stride, 4 * stride)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resize_conv_matches_its_two_steps_with_gradients(mode: str) -> None:
    layer = ResizeConv(2, 3, 3, mode=mode, bias=True, generator=gen())
    x = randn(2, 2, 5, 6, seed=1, grad=True)
    nearest = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    larger = nearest if mode == "nearest" else torch.nn.Upsample(scale_factor=2, mode="bilinear")(x)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    assert_same_with_gradients(
        layer(x), convolution.conv2d_reference(larger, weight, bias, padding=1), [x, weight, bias]
    )


def test_phase_variance_is_the_power_at_the_period() -> None:
    y = randn(2, 12, 18, dtype=torch.float64)
    for period in (2, 3):
        spectrum = torch.fft.fft2(y, norm="forward").abs().square()
        power = spectrum[:, :: 12 // period, :: 18 // period].sum((1, 2)) - spectrum[:, 0, 0]
        assert_close(convolution.phase_variance(y, period), power)
    board = ((torch.arange(6)[:, None] + torch.arange(6)) % 2 * 2 - 1).double()
    assert (
        float(convolution.phase_variance(board, 2)) == 1.0
        and float(convolution.phase_variance(board * 0 + 3, 2)) == 0.0
    )
    with pytest.raises(ConfigError, match="period is 4"):
        convolution.phase_variance(board, 4)


def test_conv_transpose_has_checkerboard_resize_has_none() -> None:
    def mean(layers: list[torch.nn.Module]) -> float:
        return sum(convolution.checkerboard_energy(layer, 8, 2, generator=gen(5)) for layer in layers) / len(
            layers
        )

    seeds = range(8)
    three = mean([ConvTranspose2d(8, 8, 3, generator=gen(s)) for s in seeds])
    four = mean([ConvTranspose2d(8, 8, 4, generator=gen(s)) for s in seeds])
    for mode in ("nearest", "bilinear"):
        assert mean([ResizeConv(8, 8, 3, mode=mode, generator=gen(s)) for s in seeds]) < 1e-9
    # Four independent phases of equal energy: 3/4 of it is pattern, for any kernel.
    assert three > 0.6 and four == pytest.approx(0.75, abs=0.1)

    # With equal weights only the tap counts differ: 4, 2, 2 and 1 for kernel 3; 4 for all for kernel 4.
    layers = [ConvTranspose2d(1, 1, kernel) for kernel in (3, 4)]
    for layer in layers:
        torch.nn.init.ones_(layer.weight)
    assert convolution.checkerboard_energy(layers[0], 1, 2) == pytest.approx((25 / 4 - 81 / 16) / (25 / 4))
    assert convolution.checkerboard_energy(layers[1], 1, 2) < 1e-9


def test_patches_are_cut_row_by_row() -> None:
    images = randn(2, 3, 6, 8)
    patches = to_patches(images, 2)
    assert patches.shape == (2, 12, 12)
    assert torch.equal(patches[1, 5], images[1, :, 2:4, 2:4].flatten())  # row 1, column 1 of 3 x 4
    assert torch.equal(from_patches(patches, (3, 4), 2), images)


def test_patch_embedding_matches_strided_convolution() -> None:
    layer = PatchEmbedding(3, 4, 10, generator=gen())
    images = randn(2, 3, 8, 12, seed=1, grad=True)
    weight, bias = layer.linear.weight, layer.linear.bias
    want = F.conv2d(images, weight.view(10, 3, 4, 4), bias, stride=4).flatten(2).transpose(1, 2)
    assert_same_with_gradients(layer(images), want, [images, weight, bias])
