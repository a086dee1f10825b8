"""Convolutions against their definitions and torch's; patches; the checkerboard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.convolution import (
    Conv2d,
    ConvTranspose2d,
    ResizeConv,
    checkerboard_energy,
    conv2d_reference,
    conv_transpose2d_reference,
    phase_variance,
)
from whorl.nn.patches import PatchEmbedding, from_patches, to_patches


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def held_together(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients of two graphs over the same inputs."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    upstream = torch.randn(ours.shape, generator=gen(9))
    a, b = (torch.autograd.grad(y, inputs, upstream) for y in (ours, theirs))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize(
    ("stride", "padding", "groups"), [(1, 0, 1), (1, 1, 3), (2, 1, 1), (3, 2, 2), (2, 0, 6)]
)
def test_convolve_equals_torch_with_gradients(
    kernel: tuple[int, int], stride: int, padding: int, groups: int
) -> None:
    x = torch.randn(2, 6, 9, 8, generator=gen(), requires_grad=True)
    weight = torch.randn(12, 6 // groups, *kernel, generator=gen(1), requires_grad=True)
    bias = torch.randn(12, generator=gen(2), requires_grad=True)
    ours = conv2d_reference(x, weight, bias, stride=stride, padding=padding, groups=groups)
    held_together(ours, F.conv2d(x, weight, bias, stride, padding, groups=groups), [x, weight, bias])


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize(
    ("stride", "padding", "extra", "groups"), [(1, 0, 0, 1), (1, 1, 0, 3), (2, 1, 1, 1), (3, 2, 2, 2)]
)
def test_transpose_convolve_equals_torch_with_gradients(
    kernel: tuple[int, int], stride: int, padding: int, extra: int, groups: int
) -> None:
    x = torch.randn(2, 6, 5, 4, generator=gen(), requires_grad=True)
    weight = torch.randn(6, 12 // groups, *kernel, generator=gen(1), requires_grad=True)
    bias = torch.randn(12, generator=gen(2), requires_grad=True)
    settings = {"stride": stride, "padding": padding, "output_padding": extra, "groups": groups}
    ours = conv_transpose2d_reference(x, weight, bias, **settings)
    held_together(ours, F.conv_transpose2d(x, weight, bias, **settings), [x, weight, bias])


def test_the_transpose_is_the_gradient_of_the_convolution() -> None:
    x = torch.randn(1, 3, 9, 9, generator=gen(), requires_grad=True)
    weight = torch.randn(5, 3, 3, 3, generator=gen(1))
    y = conv2d_reference(x, weight, stride=2, padding=1)
    upstream = torch.randn(y.shape, generator=gen(2))
    (gradient,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(conv_transpose2d_reference(upstream, weight, stride=2, padding=1), gradient)


@pytest.mark.parametrize(("kernel", "stride", "groups"), [(3, 1, 1), (3, 2, 2), (1, 2, 1), (5, 1, 4)])
def test_conv2d_equals_its_definition_and_knows_its_cost(kernel: int, stride: int, groups: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = Conv2d(4, 8, kernel, stride=stride, groups=groups, bias=True, generator=gen())
    torch.nn.init.normal_(layer.bias, generator=gen(1))
    x = torch.randn(1, 4, 8, 8, generator=gen(2), requires_grad=True)
    want = conv2d_reference(x, layer.weight, layer.bias, stride=stride, padding=kernel // 2, groups=groups)
    held_together(layer(x), want, [x, layer.weight, layer.bias])
    assert layer.output_size(8) == want.shape[-1]
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == layer.flops(8)
    low = layer(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), want, atol=0.1, rtol=0.1)


def test_the_initial_weights_keep_the_size_of_activations_and_follow_the_seed() -> None:
    layer = Conv2d(32, 64, 3, generator=gen())
    assert torch.equal(layer.weight, Conv2d(32, 64, 3, generator=gen()).weight)
    y = layer(torch.randn(4, 32, 16, 16, generator=gen(1)))[..., 1:-1, 1:-1].relu()
    assert float(y.detach().square().mean()) == pytest.approx(1.0, rel=0.1)
    assert not Conv2d(3, 3, 3, std=0).weight.any()
    for kernel in (2, 3, 4):
        wider = ConvTranspose2d(32, 64, kernel, generator=gen())
        y = wider(torch.randn(4, 32, 16, 16, generator=gen(1)))[..., 2:-2, 2:-2].relu()
        assert float(y.detach().square().mean()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("stride", "more"), [(1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (4, 3)]
)
def test_upsampling_layers_are_exactly_so_many_times_larger(stride: int, more: int) -> None:
    x = torch.randn(1, 2, 5, 4, generator=gen())
    layer = ConvTranspose2d(2, 3, stride + more, stride=stride, bias=True, generator=gen(1))
    assert layer(x).shape == (1, 3, 5 * stride, 4 * stride)
    settings = {"stride": stride, "padding": layer.padding, "output_padding": layer.output_padding}
    torch.testing.assert_close(layer(x), conv_transpose2d_reference(x, layer.weight, layer.bias, **settings))
    assert ResizeConv(2, 3, 3, scale=stride, generator=gen(1))(x).shape == (1, 3, 5 * stride, 4 * stride)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resize_conv_equals_its_two_steps_with_gradients(mode: str) -> None:
    layer = ResizeConv(2, 3, 3, mode=mode, bias=True, generator=gen())
    x = torch.randn(2, 2, 5, 6, generator=gen(1), requires_grad=True)
    if mode == "nearest":
        larger = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    else:
        larger = torch.nn.Upsample(scale_factor=2, mode="bilinear")(x)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    held_together(layer(x), conv2d_reference(larger, weight, bias, padding=1), [x, weight, bias])


def test_phase_variance_is_the_power_at_the_frequencies_of_the_period() -> None:
    y = torch.randn(2, 12, 18, generator=gen(), dtype=torch.float64)
    for period in (2, 3):
        spectrum = torch.fft.fft2(y, norm="forward").abs().square()
        power = spectrum[:, :: 12 // period, :: 18 // period].sum((1, 2)) - spectrum[:, 0, 0]
        torch.testing.assert_close(phase_variance(y, period), power)
    board = ((torch.arange(6)[:, None] + torch.arange(6)) % 2 * 2 - 1).double()
    assert float(phase_variance(board, 2)) == 1.0 and float(phase_variance(board * 0 + 3, 2)) == 0.0
    with pytest.raises(ConfigError, match="period is 4"):
        phase_variance(board, 4)


def test_transposed_convolutions_leave_a_checkerboard_and_resized_ones_do_not() -> None:
    def mean(layers: list[torch.nn.Module]) -> float:
        return sum(checkerboard_energy(layer, 8, 2, generator=gen(5)) for layer in layers) / len(layers)

    seeds = range(8)
    three = mean([ConvTranspose2d(8, 8, 3, generator=gen(s)) for s in seeds])
    four = mean([ConvTranspose2d(8, 8, 4, generator=gen(s)) for s in seeds])
    for mode in ("nearest", "bilinear"):
        assert mean([ResizeConv(8, 8, 3, mode=mode, generator=gen(s)) for s in seeds]) < 1e-9
    # Four independent phases of equal energy: 3/4 of it is pattern, whatever the kernel.
    assert three > 0.6 and four == pytest.approx(0.75, abs=0.1)

    # With equal weights what is left is the counts of taps alone: 4, 2, 2 and 1; and 4 for all.
    layers = [ConvTranspose2d(1, 1, kernel) for kernel in (3, 4)]
    for layer in layers:
        torch.nn.init.ones_(layer.weight)
    assert checkerboard_energy(layers[0], 1, 2) == pytest.approx((25 / 4 - 81 / 16) / (25 / 4))
    assert checkerboard_energy(layers[1], 1, 2) < 1e-9


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups is 3"):
        Conv2d(4, 6, 3, groups=3)
    with pytest.raises(ConfigError, match="stride is 0"):
        Conv2d(4, 6, 3, stride=0)
    with pytest.raises(ConfigError, match="kernel_size is 2"):
        ConvTranspose2d(4, 6, 2, stride=3)
    with pytest.raises(ConfigError, match="kernel_size is 2 at stride 1"):
        ConvTranspose2d(4, 6, 2, stride=1)
    with pytest.raises(ConfigError, match="kernel_size is 4"):
        ResizeConv(4, 6, 4)
    with pytest.raises(ConfigError, match="mode is 'cubic'"):
        ResizeConv(4, 6, mode="cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patch is 3 and the image 8 x 6"):
        to_patches(torch.zeros(1, 1, 8, 6), 3)
    with pytest.raises(ConfigError, match=r"images are \[8, 6\]"):
        to_patches(torch.zeros(8, 6), 2)
    with pytest.raises(ConfigError, match=r"patches are \[1, 5, 4\]"):
        from_patches(torch.zeros(1, 5, 4), 2, 4, 4)
    with pytest.raises(ConfigError, match="2 channels"):
        PatchEmbedding(1, 2, 8)(torch.zeros(1, 2, 4, 4))


def test_patches_are_cut_row_by_row_and_put_back() -> None:
    images = torch.randn(2, 3, 6, 8, generator=gen())
    patches = to_patches(images, 2)
    assert patches.shape == (2, 12, 12)
    assert torch.equal(patches[1, 5], images[1, :, 2:4, 2:4].flatten())  # row 1, column 1 of 3 x 4
    assert torch.equal(from_patches(patches, 2, 6, 8), images)


def test_patch_embedding_equals_a_strided_convolution_with_gradients() -> None:
    layer = PatchEmbedding(3, 4, 10, generator=gen())
    images = torch.randn(2, 3, 8, 12, generator=gen(1), requires_grad=True)
    weight, bias = layer.linear.weight, layer.linear.bias
    want = F.conv2d(images, weight.view(10, 3, 4, 4), bias, stride=4).flatten(2).transpose(1, 2)
    held_together(layer(images), want, [images, weight, bias])
