"""Norms against torch: values, gradients and running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import randn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm


@torch.no_grad()
def draw_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    """Draw the weights of `ours`, and copy them to `theirs`."""
    for seed, parameter in enumerate(ours.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=100 + seed))
    theirs.load_state_dict(ours.state_dict())


def assert_norms_equal(ours: Any, theirs: Any, x: Tensor) -> None:
    """Compare values, and gradients of x and of the parameters."""
    found = []
    for norm in (ours, theirs):
        leaf = x.detach().clone().requires_grad_()
        y = norm(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *norm.parameters()], randn(*x.shape, seed=77))])
    assert all(bool(t.any()) for t in found[0])
    assert_close(*found, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 10)])
def test_layer_norm_matches_torch(bias: bool, eps: float, shape: tuple[int, ...]) -> None:
    ours, theirs = LayerNorm(10, eps, bias), nn.LayerNorm(10, eps, bias=bias)
    draw_parameters(ours, theirs)
    x = 3 * randn(*shape) + 2
    assert_norms_equal(ours, theirs, x)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_module_matches_torch(eps: float) -> None:
    ours, theirs = RMSNorm(10, eps), nn.RMSNorm(10, eps)
    assert torch.equal(ours.weight, torch.ones(10))
    draw_parameters(ours, theirs)
    x = 3 * randn(2, 3, 10) + 2
    assert_norms_equal(ours, theirs, x)


def test_rms_norm_with_offset_matches_gemma() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    ours, theirs = RMSNorm(10, offset=1.0), GemmaRMSNorm(10, eps=1e-6)
    assert not ours.weight.any()  # a new one has gain 1
    x = 3 * randn(2, 3, 10) + 2
    assert_close(ours(x), RMSNorm(10)(x))
    draw_parameters(ours, theirs)
    assert_norms_equal(ours, theirs, x)


@pytest.mark.parametrize("groups", [1, 2, 3, 12])
@pytest.mark.parametrize("shape", [(4, 12), (4, 12, 5), (2, 12, 3, 4)])
def test_group_norm_matches_torch(groups: int, shape: tuple[int, ...]) -> None:
    ours, theirs = GroupNorm(groups, 12), nn.GroupNorm(groups, 12)
    draw_parameters(ours, theirs)
    x = 3 * randn(*shape) + 2
    if groups == 12 and x.ndim == 2:  # one value per group equals its mean
        assert_close(ours(x), ours.bias.expand_as(x))
        return
    assert_norms_equal(ours, theirs, x)
    if x.ndim == 4:
        last = x.to(memory_format=torch.channels_last)
        assert_close(ours(last), ours(x))


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("shape", [(8, 6), (5, 6, 7), (3, 6, 4, 5)])
def test_batch_norm_matches_torch_in_train_and_eval(momentum: float | None, shape: tuple[int, ...]) -> None:
    torchs: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    ours, theirs = BatchNorm(6, momentum=momentum), torchs[len(shape)](6, momentum=momentum)
    draw_parameters(ours, theirs)
    for step in range(3):
        x = 3 * randn(*shape, seed=step) + 2 * step
        assert_norms_equal(ours, theirs, x)
        for name, buffer in theirs.named_buffers():
            assert_close(ours.get_buffer(name), buffer)
    before = {name: b.clone() for name, b in ours.named_buffers()}
    ours.eval(), theirs.eval()
    assert_norms_equal(ours, theirs, x)
    assert_close(ours(x[:1]), theirs(x[:1]))  # a single row
    assert all(torch.equal(b, ours.get_buffer(name)) for name, b in before.items())
    assert BatchNorm(6)(torch.randn(1, 6, 2)).shape == (1, 6, 2)
    assert BatchNorm(6).eval()(torch.randn(1, 6)).shape == (1, 6)


@pytest.mark.parametrize("channels_first", [True, False])
def test_norm_statistics_are_fp32_for_bf16_input(channels_first: bool) -> None:
    """Values around 100 with a standard deviation of 1: bf16 sums would lose all digits of the variance."""
    x = (100 + randn(16, 64, 8)).bfloat16()
    norms = [GroupNorm(4, 64), BatchNorm(64)] if channels_first else [LayerNorm(8), RMSNorm(8)]
    for norm in norms:
        out = norm(x)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, norm(x.float()).bfloat16()), type(norm)
        assert all(b.dtype != torch.bfloat16 for b in norm.buffers())
    if channels_first:
        norm = BatchNorm(64, momentum=1.0)
        norm(x)
        assert_close(norm.running_var, x.double().var((0, 2)).float())
    else:
        want = F.layer_norm(x.float(), (8,)).bfloat16()
        assert_close(norms[0](x), want, atol=1e-3, rtol=1e-2)


def test_layer_norm_variance_is_exact_for_large_mean() -> None:
    x = randn(4, 256) + 4000
    want = F.layer_norm(x.double(), (256,)).float()
    assert_close(LayerNorm(256)(x), want, atol=1e-3, rtol=1e-3)
