"""U-Net: shapes, the block's formula, what the output depends on, gradients, bad input."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.vision.unet import GROUPS, ResidualBlock, UNet


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def disturbed(network: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter, so that no layer is 0."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn(p.shape, generator=rng) * 0.05)
    return network


@pytest.mark.parametrize(("size", "channels", "depth"), [(8, 1, 3), (32, 3, 3), (7, 1, 1)])
def test_shapes_are_kept_and_the_first_output_is_zero(size: int, channels: int, depth: int) -> None:
    network = UNet(size, channels, width=16, depth=depth, generator=torch.Generator().manual_seed(0))
    x, time = normal(2, channels, size, size), torch.tensor([0.1, 0.9])
    assert torch.equal(network(x, time), torch.zeros_like(x))
    out = disturbed(network)(x, time)
    assert out.shape == x.shape and out.std() > 0.01


@pytest.mark.parametrize("c_out", [16, 32])
def test_residual_block_equals_its_formula(c_out: int) -> None:
    block = ResidualBlock(16, c_out, 12, torch.Generator().manual_seed(0))
    disturbed(block)
    x, c, p = normal(3, 16, 6, 6), normal(3, 12, seed=1), dict(block.named_parameters())
    h = F.silu(F.group_norm(x, GROUPS, p["norm1.weight"], p["norm1.bias"]))
    h = F.conv2d(h, p["convolution1.weight"], p["convolution1.bias"], padding=1)
    h = h + (F.silu(c) @ p["condition.weight"].T).view(3, c_out, 1, 1)
    h = F.silu(F.group_norm(h, GROUPS, p["norm2.weight"], p["norm2.bias"]))
    h = F.conv2d(h, p["convolution2.weight"], p["convolution2.bias"], padding=1)
    kept = x if c_out == 16 else F.conv2d(x, p["shortcut.weight"])
    torch.testing.assert_close(block(x, c), kept + h, atol=1e-5, rtol=1e-5)


def test_output_depends_on_time_class_and_every_place() -> None:
    network = disturbed(
        UNet(8, 1, width=16, depth=3, n_classes=3, generator=torch.Generator().manual_seed(0))
    )
    x = normal(1, 1, 8, 8).requires_grad_()
    time, label = torch.tensor([0.3]), torch.tensor([1])
    out = network(x, time, label)
    for other in (network(x, time + 0.3, label), network(x, time, label + 1), network(x, time)):
        assert (out - other).abs().max() > 1e-3
    (slope,) = torch.autograd.grad(out[0, 0, 0, 0], x, retain_graph=True)
    assert (slope != 0).all()  # the attention at the lowest level sees the whole image
    out.square().sum().backward()
    assert [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="pictures have side 10"):
        UNet(10, 1, width=16, depth=3)
    with pytest.raises(ConfigError, match="width is 12"):
        UNet(8, 1, width=12)
    with pytest.raises(ConfigError, match="images are"):
        UNet(8, 1, width=16)(normal(2, 3, 8, 8), torch.zeros(2))
