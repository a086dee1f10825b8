"""Rotary positions: both layouts, conversion between them, partial rotation, and scaling against `transformers`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.nn.checks import randn
from torch import Tensor
from torch.testing import assert_close

from whorl.nn.rotary import (
    Layout,
    RopeScaling,
    Rotary,
    apply_rotary,
    rotary_frequencies,
    rotary_tables,
    to_interleaved,
)

SCALINGS = [
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("ntk", 4.0),
    RopeScaling("yarn", 4.0, original_length=64),
    RopeScaling("llama3", 4.0, original_length=64),
]


def rotate_by_complex_numbers(
    x: Tensor, positions: Tensor, frequency: Tensor, layout: str, gain: float
) -> Tensor:
    """One feature pair at a time, as a complex number.  x: [B, T, H, d]."""
    out, half = x.clone(), len(frequency)
    for i in range(half):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        angle = positions.double() * float(frequency[i])
        turn = gain * torch.polar(torch.ones_like(angle), angle)[..., None]
        z = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        out[..., a], out[..., b] = z.real.to(x.dtype), z.imag.to(x.dtype)
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
@pytest.mark.parametrize("scaling", [*SCALINGS[:2], *SCALINGS[3:]])  # "ntk" needs a rotary_dim above 2
def test_rotary_matches_complex_multiplication(layout: Layout, rotary_dim: Any, scaling: Any) -> None:
    rotary = Rotary(16, 100.0, torch.float32, scaling, layout, rotary_dim)
    x = randn(2, 5, 3, 16)
    frequency = rotary_frequencies(rotary_dim or 16, 100.0, scaling)
    gain = 0.1 * math.log(4.0) + 1.0 if scaling is not None and scaling.kind == "yarn" else 1.0
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 70, 0, 3]])
    want = rotate_by_complex_numbers(x, positions, frequency, layout, gain)
    assert torch.equal(want[..., rotary_dim or 16 :], x[..., rotary_dim or 16 :])
    assert_close(rotary.rotate(x, rotary.tables_at(positions)), want, atol=1e-5, rtol=1e-5)
    for start, atol in ((70, 1e-5), (2000, 4e-3)):
        run = rotary.rotate(x, rotary.tables_between(start, start + 5, x.device))
        later = rotate_by_complex_numbers(x, torch.arange(start, start + 5), frequency, layout, gain)
        assert_close(run, later, atol=atol, rtol=1e-5)
    tables = rotary_tables(positions, 16, 100.0, torch.float32, scaling, layout, rotary_dim)
    assert tables[0].shape == tables[1].shape == (2, 5, 1, rotary_dim or 16)
    assert torch.equal(apply_rotary(x, *tables, layout), rotary.rotate(x, rotary.tables_at(positions)))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rotary_gradient_is_the_inverse_rotation(layout: Layout, rotary_dim: int | None) -> None:
    """A rotation's transpose is its inverse: the gradient of rotated x, with rotated x upstream, is x."""
    rotary = Rotary(16, 100.0, torch.float32, layout=layout, rotary_dim=rotary_dim)
    x = randn(2, 5, 3, 16, grad=True)
    y = rotary.rotate(x, rotary.tables_between(3, 8, x.device))
    (back,) = torch.autograd.grad(y, x, y.detach())
    assert_close(back, x.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_cached_tables_equal_new_ones(scaling: RopeScaling | None) -> None:
    rotary = Rotary(16, 1e4, torch.bfloat16, scaling, "interleaved", 8)
    kept = rotary.tables_between(3, 40, torch.device("cpu"))
    assert rotary.tables_upto(40, torch.device("cpu"))[0].shape[0] >= 40
    for a, b in zip(kept, rotary.tables_at(torch.arange(3, 40)), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("scaling", [None, SCALINGS[4]])
def test_layout_conversion_of_weights_keeps_scores(rotary_dim: Any, scaling: Any) -> None:
    n_heads, n_kv, head_dim, d = 4, 2, 16, 24
    x = randn(1, 9, d)
    w_q, w_k = (randn(n * head_dim, d, seed=n) for n in (n_heads, n_kv))
    bias = randn(n_heads * head_dim, seed=9)

    def scores(layout: Layout, w_q: Tensor, bias: Tensor, w_k: Tensor) -> Tensor:
        rotary = Rotary(head_dim, 100.0, torch.float32, scaling, layout, rotary_dim)
        tables = rotary.tables_between(0, 9, x.device)
        q = rotary.rotate((x @ w_q.T + bias).view(1, 9, n_heads, head_dim), tables)
        k = rotary.rotate((x @ w_k.T).view(1, 9, n_kv, head_dim), tables)
        return torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(n_heads // n_kv, dim=2))

    heads = ((w_q, n_heads), (bias, n_heads), (w_k, n_kv))
    converted = [to_interleaved(t, n, head_dim, rotary_dim) for t, n in heads]
    interleaved, half = scores("interleaved", w_q, bias, w_k), scores("half", w_q, bias, w_k)
    assert_close(scores("interleaved", *converted), half, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(half, interleaved, atol=1e-1)  # the wrong layout gives other scores


def test_to_interleaved_order_matches_manual_example() -> None:
    rows = torch.arange(12)
    assert to_interleaved(rows, 2, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert to_interleaved(rows, 2, 6, rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def transformers_frequencies(
    kind: str,
    head_dim: int,
    base: float,
    length: int = 131_072,
    seq_len: int | None = None,
    **parameters: Any,
) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": base, **parameters}
    sizes = {"hidden_size": head_dim * 2, "num_attention_heads": 2, "max_position_embeddings": length}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, **sizes)
    frequency, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return frequency, float(gain)


@pytest.mark.parametrize("head_dim, base", [(64, 1e4), (128, 5e5), (128, 1e6)])
@pytest.mark.parametrize("factor", [2.0, 8.0, 40.0])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "short", "long", "DeepSeek", "gpt-oss"])
def test_rope_scaling_matches_transformers(
    kind: str, head_dim: int, base: float, factor: float, partial: float
) -> None:
    length = {"llama3": 8192, "short": 64, "long": 131_072}.get(kind, 4096)
    theirs = {"factor": factor, "partial_rotary_factor": partial, "original_max_position_embeddings": length}
    if kind == "linear":
        ours = RopeScaling("linear", factor)
    elif kind == "llama3":
        ours = RopeScaling("llama3", factor, length)
        theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif kind == "DeepSeek":  # equal `mscale`s: no gain in the tables
        ours = RopeScaling("yarn", factor, length, attention_factor=1.0)
        theirs |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    elif kind == "gpt-oss":
        ours = RopeScaling("yarn", factor, length, low=0.5, high=16.0, truncate=False)
        theirs |= {"beta_slow": 0.5, "beta_fast": 16.0, "truncate": False}
    else:  # the ramp inside, or beyond the first or last wave
        ours = RopeScaling("yarn", factor, length)
    want, gain = transformers_frequencies(ours.kind, head_dim, base, **theirs)
    assert_close(rotary_frequencies(int(head_dim * partial), base, ours), want, atol=0, rtol=2e-6)
    assert ours.attention_scaling == pytest.approx(gain)


@pytest.mark.parametrize("head_dim", [4, 64, 128])
def test_ntk_scaling_matches_transformers_dynamic(head_dim: int) -> None:
    # A row of 3 * 2048 with factor 4 makes the base grow as if by 4 * 3 - 3 = 9.
    want, _ = transformers_frequencies("dynamic", head_dim, 1e4, 2048, seq_len=3 * 2048, factor=4.0)
    assert_close(rotary_frequencies(head_dim, 1e4, RopeScaling("ntk", 9.0)), want, atol=0, rtol=2e-6)


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_rope_scaling_with_factor_one_is_identity(scaling: RopeScaling) -> None:
    one = RopeScaling(scaling.kind, 1.0, scaling.original_length)
    assert_close(rotary_frequencies(32, 1e4, one), rotary_frequencies(32), rtol=1e-6, atol=0)
    assert one.attention_scaling == 1.0


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_bf16_is_close_to_fp32(layout: Layout) -> None:
    x = randn(1, 6, 2, 16)
    low, high = (Rotary(16, 1e4, t, layout=layout, rotary_dim=8) for t in (torch.bfloat16, torch.float32))
    out = low.rotate(x.bfloat16(), low.tables_between(4000, 4006, x.device))
    assert out.dtype == torch.bfloat16
    want = high.rotate(x, high.tables_between(4000, 4006, x.device))
    assert_close(out.float(), want, atol=5e-2, rtol=2e-2)
