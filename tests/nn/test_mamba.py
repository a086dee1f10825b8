"""The selective scan, the layer of `transformers`, gradients in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, copy_values, gen, randn, saved_sizes
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn import mamba as module
from whorl.nn.mamba import Mamba, selective_scan, selective_scan_reference


def scan_inputs(
    batch: int, length: int, inner: int, n: int, dtype: Any = torch.float32
) -> list[torch.Tensor]:
    """Return x, delta, a, b, c, with gradients, and a state."""
    delta = F.softplus(randn(batch, length, inner, seed=1, dtype=dtype) - 1)
    steps = torch.arange(1, n + 1, dtype=dtype).repeat(inner, 1)
    a = -steps * (1 + 0.1 * randn(inner, n, seed=2, dtype=dtype).abs())
    b, c = (randn(batch, length, n, seed=seed, dtype=dtype) for seed in (3, 4))
    leaves = [randn(batch, length, inner, dtype=dtype), delta, a, b, c]
    return [t.requires_grad_() for t in leaves] + [randn(batch, n, inner, seed=5, dtype=dtype)]


def make_layer(d_model: int, **options: Any) -> Mamba:
    layer = Mamba(d_model, generator=gen(), **options)
    torch.nn.init.normal_(layer.out.weight, std=0.3, generator=gen(1))
    torch.nn.init.normal_(layer.convolution.bias, std=0.3, generator=gen(2))
    return layer


@pytest.mark.parametrize("bordered", [False, True])
@pytest.mark.parametrize("length, chunk, rows", [(1, 4, 9), (12, 4, 2), (13, 4, 1), (9, None, 2), (5, 1, 3)])
def test_selective_scan_matches_reference_with_gradients(
    length: int, chunk: int | None, rows: int, bordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROW_ELEMENTS", rows * 6 * 4)
    *leaves, memory = scan_inputs(3, length, 6, 4)
    keep = (torch.rand(3, length, generator=gen(6)) > 0.3).float() if bordered else None
    upstream = randn(3, length, 6, seed=7)
    results = []
    for scan, how in ((selective_scan, {"chunk": chunk}), (selective_scan_reference, {})):
        y, last = scan(*leaves, memory, keep, **how)  # type: ignore[operator]
        results.append([y, last, *torch.autograd.grad(y, leaves, upstream)])
    assert_close(*results, atol=1e-5, rtol=1e-4)


def test_selective_scan_saves_one_state_per_chunk() -> None:
    *leaves, memory = scan_inputs(2, 64, 16, 8)
    with saved_sizes() as held:
        selective_scan(*leaves, memory, chunk=16)
    all_states = 64 * memory.numel()
    assert sum(held) <= all_states / 16 + sum(t.numel() for t in leaves)


@pytest.mark.parametrize("size", [1e-30, 40.0, 1e4])
def test_selective_scan_is_exact_for_extreme_decays(size: float) -> None:
    *leaves, memory = scan_inputs(1, 40, 4, 3)
    leaves[1] = torch.full((1, 40, 4), size, requires_grad=True)
    y, _ = selective_scan(*leaves, memory)
    want, _ = selective_scan_reference(*(t.detach().double() for t in leaves), memory.double())
    assert_close(y.double(), want, atol=1e-5, rtol=1e-4)
    for gradient in torch.autograd.grad(y.sum(), leaves):
        assert gradient.isfinite().all()


def test_mamba_passes_gradcheck_with_document_border() -> None:
    layer = make_layer(2, d_state=2, chunk=2).double()
    x = randn(1, 5, 2, seed=1, dtype=torch.float64, grad=True)
    segments = torch.tensor([[0, 0, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, segments=segments), (x, *layer.parameters()))


def test_causal_conv1d_matches_short_convolution() -> None:
    layer = make_layer(6, width=5).convolution
    x = randn(2, 9, 12, seed=1, grad=True)
    assert_same_with_gradients(module.causal_conv1d(x, layer), layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize("length", [1, 3, 21])
def test_mamba_matches_transformers(length: int) -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    sizes = {"hidden_size": 32, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 2}
    config = MambaConfig(**sizes, num_hidden_layers=1)
    theirs, ours = MambaMixer(config, 0).eval(), make_layer(32)
    pairs = {
        theirs.in_proj.weight: ours.inward.weight,
        theirs.conv1d.weight: ours.convolution.weight.flip(1)[:, None],  # Whorl has the newest position first
        theirs.conv1d.bias: ours.convolution.bias,
        theirs.x_proj.weight: ours.selection.weight,
        theirs.dt_proj.weight: ours.delta.weight,
        theirs.dt_proj.bias: ours.delta.bias,
        theirs.A_log: ours.a_log,
        theirs.D: ours.d,
        theirs.out_proj.weight: ours.out.weight,
    }
    assert len(pairs) == len(list(theirs.parameters())) == len(list(ours.parameters()))
    assert_close(theirs.A_log, ours.a_log)  # equal initial values
    copy_values(pairs)
    results = []
    for layer, first in ((ours, ours.inward), (theirs, theirs.in_proj)):
        x = randn(2, length, 32, seed=3, grad=True)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, first.weight))])
    assert_close(*results, atol=2e-5, rtol=1e-4)


def test_mamba_initial_weights_match_paper() -> None:
    layer = Mamba(64, generator=gen())
    assert_close(layer.a_log.exp(), torch.arange(1.0, 17.0).repeat(128, 1))
    step = F.softplus(layer.delta.bias)
    assert 1e-3 * 0.99 <= step.min() < 2e-3 and 5e-2 < step.max() <= 1e-1 * 1.01
    assert abs(step.log().mean() - math.log(1e-2)) < 0.4
    assert layer.rank == 4 and (layer.d == 1).all()
    assert not layer(torch.randn(1, 3, 64)).any()


def test_mamba_bf16_is_close_and_state_is_fp32() -> None:
    layer = make_layer(16)
    x = randn(2, 200, 16, seed=1).bfloat16()
    state = layer.new_state(2, 200, dtype=torch.bfloat16)
    y, want = layer(x, state=state), layer(x.float())
    assert y.dtype == torch.bfloat16 and state.ssm_state.dtype == torch.float32
    assert (y.float() - want).norm() < 0.02 * want.norm()
