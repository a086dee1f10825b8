"""Convolutions against their definitions and torch; patches; the checkerboard measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn import convolution
from whorl.nn.convolution import Conv2d
from whorl.nn.patches import PatchEmbedding, to_patches


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
    inside = layer(x)[..., 2:-2, 2:-2].relu()
    assert float(inside.detach().square().mean()) == pytest.approx(1.0, rel=0.1)


def test_patches_are_cut_row_by_row() -> None:
    images = randn(2, 3, 6, 8)
    patches = to_patches(images, 2)
    assert patches.shape == (2, 12, 12)
    assert torch.equal(patches[1, 5], images[1, :, 2:4, 2:4].flatten())  # row 1, column 1 of 3 x 4


def test_patch_embedding_matches_strided_convolution() -> None:
    layer = PatchEmbedding(3, 4, 10, generator=gen())
    images = randn(2, 3, 8, 12, seed=1, grad=True)
    weight, bias = layer.linear.weight, layer.linear.bias
    want = F.conv2d(images, weight.view(10, 3, 4, 4), bias, stride=4).flatten(2).transpose(1, 2)
    assert_same_with_gradients(layer(images), want, [images, weight, bias])
