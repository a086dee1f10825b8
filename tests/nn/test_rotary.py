"""Rotary positions: both layouts, conversion between them, partial rotation, and scaling against `transformers`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.nn.checks import gen, randn
from torch import Tensor

from whorl.nn.positions.rotary import (
    Layout,
    RopeScaling,
    Rotary,
    apply_rotary,
    rotary_frequencies,
    rotary_tables,
    to_half_split,
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
    x: Tensor, positions: Tensor, frequency: Tensor, layout: Layout, gain: float = 1.0
) -> Tensor:
    """One feature pair at a time, as a complex number.  x: [B, T, H, d]."""
    out = x.clone()
    half = len(frequency)
    for i in range(half):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        angle = positions.double() * float(frequency[i])
        turn = gain * torch.polar(torch.ones_like(angle), angle)[..., None]
        z = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        out[..., a], out[..., b] = z.real.to(x.dtype), z.imag.to(x.dtype)
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
@pytest.mark.parametrize("scaling", [SCALINGS[0], SCALINGS[3]])
def test_rotary_matches_complex_multiplication(
    layout: Layout, rotary_dim: int | None, scaling: RopeScaling | None
) -> None:
    rotary = Rotary(16, 100.0, torch.float32, scaling, layout, rotary_dim)
    x = randn(2, 5, 3, 16)
    frequency = rotary_frequencies(rotary_dim or 16, 100.0, scaling)
    gain = 1.0 if scaling is None else 0.1 * math.log(4.0) + 1.0
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 70, 0, 3]])
    want = rotate_by_complex_numbers(x, positions, frequency, layout, gain)
    assert torch.equal(want[..., rotary_dim or 16 :], x[..., rotary_dim or 16 :])
    torch.testing.assert_close(rotary.rotate(x, rotary.tables_at(positions)), want, atol=1e-5, rtol=1e-5)
    run = rotary.rotate(x, rotary.tables_between(70, 75, x.device))
    torch.testing.assert_close(
        run, rotate_by_complex_numbers(x, torch.arange(70, 75), frequency, layout, gain), atol=1e-5, rtol=1e-5
    )
    tables = rotary_tables(positions, 16, 100.0, torch.float32, scaling, layout, rotary_dim)
    assert tables[0].shape == tables[1].shape == (2, 5, 1, rotary_dim or 16)
    assert torch.equal(apply_rotary(x, *tables, layout), rotary.rotate(x, rotary.tables_at(positions)))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rotary_gradient_is_the_inverse_rotation(layout: Layout, rotary_dim: int | None) -> None:
    """A rotation's transpose is its inverse: the gradient of rotated x, with rotated x upstream, is x."""
    rotary = Rotary(16, 100.0, torch.float32, layout=layout, rotary_dim=rotary_dim)
    x = torch.randn(2, 5, 3, 16, generator=gen(), requires_grad=True)
    y = rotary.rotate(x, rotary.tables_between(3, 8, x.device))
    (back,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(back, x.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_cached_tables_equal_new_ones(scaling: RopeScaling | None) -> None:
    rotary = Rotary(16, 1e4, torch.bfloat16, scaling, "interleaved", 8)
    kept = rotary.tables_between(3, 40, torch.device("cpu"))
    assert rotary.tables_upto(40, torch.device("cpu"))[0].shape[0] >= 40
    for a, b in zip(kept, rotary.tables_at(torch.arange(3, 40)), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


@settings(max_examples=40, deadline=None)
@given(
    i=st.integers(0, 500),
    j=st.integers(0, 500),
    shift=st.integers(1, 1500),
    layout=st.sampled_from(["half", "interleaved"]),
    rotary_dim=st.sampled_from([None, 4, 12]),
    scaling=st.sampled_from(SCALINGS),
)
def test_rotary_scores_depend_on_distance_only(
    i: int, j: int, shift: int, layout: Layout, rotary_dim: int | None, scaling: RopeScaling | None
) -> None:
    rotary = Rotary(16, 1e4, torch.float32, scaling, layout, rotary_dim)
    q, k = randn(2, 1, 1, 1, 16)

    def score(i: int, j: int) -> float:
        rotated = (rotary.rotate(x, rotary.tables_at(torch.tensor([at]))) for x, at in ((q, i), (k, j)))
        return float(torch.mul(*rotated).sum())

    assert score(i + shift, j + shift) == pytest.approx(score(i, j), abs=4e-3)
    assert abs(score(0, 0) - score(0, 1)) > 1e-2  # they depend on it


@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("scaling", [None, SCALINGS[4]])
def test_layout_conversion_of_weights_keeps_scores(
    rotary_dim: int | None, scaling: RopeScaling | None
) -> None:
    n_heads, n_kv, head_dim, d = 4, 2, 16, 24
    x = torch.randn(1, 9, d, generator=gen())
    w_q, w_k = (torch.randn(n * head_dim, d, generator=gen(n)) for n in (n_heads, n_kv))
    bias = torch.randn(n_heads * head_dim, generator=gen(9))

    def scores(w_q: Tensor, bias: Tensor, w_k: Tensor, layout: Layout) -> Tensor:
        rotary = Rotary(head_dim, 100.0, torch.float32, scaling, layout, rotary_dim)
        tables = rotary.tables_between(0, 9, x.device)
        q = rotary.rotate((x @ w_q.T + bias).view(1, 9, n_heads, head_dim), tables)
        k = rotary.rotate((x @ w_k.T).view(1, 9, n_kv, head_dim), tables)
        return torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(n_heads // n_kv, dim=2))

    def both(convert: Any) -> tuple[Tensor, Tensor, Tensor]:
        return (
            convert(w_q, n_heads, head_dim, rotary_dim),
            convert(bias, n_heads, head_dim, rotary_dim),
            convert(w_k, n_kv, head_dim, rotary_dim),
        )

    interleaved = scores(w_q, bias, w_k, "interleaved")
    torch.testing.assert_close(scores(*both(to_half_split), "half"), interleaved, atol=1e-3, rtol=1e-4)
    half = scores(w_q, bias, w_k, "half")
    torch.testing.assert_close(scores(*both(to_interleaved), "interleaved"), half, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(half, interleaved, atol=1e-1)  # the wrong layout gives other scores
    back = to_interleaved(to_half_split(w_q, n_heads, head_dim, rotary_dim), n_heads, head_dim, rotary_dim)
    assert torch.equal(back, w_q)


def test_to_half_split_order_matches_manual_example() -> None:
    rows = torch.arange(12)
    assert to_half_split(rows, 2, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert to_half_split(rows, 2, 6, rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def transformers_frequencies(
    kind: str, head_dim: int, base: float, **parameters: Any
) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
    )
    frequency, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequency, float(gain)


@pytest.mark.parametrize("head_dim, base", [(64, 1e4), (128, 5e5), (128, 1e6)])
@pytest.mark.parametrize("factor", [2.0, 8.0, 40.0])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize(
    "kind", ["linear", "llama3", "yarn", "yarn, short", "yarn, long", "yarn as DeepSeek", "yarn as gpt-oss"]
)
def test_rope_scaling_matches_transformers(
    kind: str, head_dim: int, base: float, factor: float, partial: float
) -> None:
    theirs: dict[str, Any] = {"factor": factor, "partial_rotary_factor": partial}
    if kind == "linear":
        ours = RopeScaling("linear", factor)
    elif kind == "llama3":
        ours = RopeScaling("llama3", factor, 8192)
        theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif kind in ("yarn", "yarn, short", "yarn, long"):  # the ramp inside, or beyond the first or last wave
        length = {"yarn": 4096, "yarn, short": 64, "yarn, long": 131_072}[kind]
        ours = RopeScaling("yarn", factor, length)
        theirs |= {"original_max_position_embeddings": length}
    elif kind == "yarn as DeepSeek":  # equal `mscale`s: no gain in the tables
        ours = RopeScaling("yarn", factor, 4096, attention_factor=1.0)
        theirs |= {"original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0.7}
    else:
        ours = RopeScaling("yarn", factor, 4096, low=0.5, high=16.0, truncate=False)
        theirs |= {"original_max_position_embeddings": 4096, "beta_slow": 0.5, "beta_fast": 16.0}
        theirs |= {"truncate": False}
    want, gain = transformers_frequencies(kind.split()[0].rstrip(","), head_dim, base, **theirs)
    torch.testing.assert_close(
        rotary_frequencies(int(head_dim * partial), base, ours), want, atol=0, rtol=2e-6
    )
    assert ours.attention_scaling == pytest.approx(gain)


@pytest.mark.parametrize("head_dim", [4, 64, 128])
def test_ntk_scaling_divides_slowest_wave_and_keeps_fastest(head_dim: int) -> None:
    plain, ntk = rotary_frequencies(head_dim), rotary_frequencies(head_dim, scaling=RopeScaling("ntk", 8.0))
    assert float(ntk[0]) == float(plain[0]) == 1.0
    assert float(ntk[-1]) == pytest.approx(float(plain[-1]) / 8.0, rel=1e-4)
    assert bool((ntk[1:] < plain[1:]).all()) and bool((ntk >= plain / 8.0 * 0.9999).all())


def test_ntk_scaling_matches_transformers_dynamic() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    # A row of 3 * 2048 with factor 4 makes the base grow as if by 4 * 3 - 3 = 9.
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=3 * 2048)
    torch.testing.assert_close(rotary_frequencies(64, 1e4, RopeScaling("ntk", 9.0)), want, atol=0, rtol=2e-6)


def test_llama3_scaling_matches_ntk_by_parts() -> None:
    """Equations 17 to 20, one wave at a time."""
    base, length, factor, low, high, d = 1e4, 4096, 8.0, 1.0, 32.0, 128
    got = rotary_frequencies(d, base, RopeScaling("llama3", factor, length, low=low, high=high))
    kinds = set()
    for i in range(d // 2):
        theta = base ** (-2 * i / d)
        turns = length / (2 * math.pi / theta)
        stays = 0.0 if turns < low else 1.0 if turns > high else (turns - low) / (high - low)
        kinds.add("none" if stays == 0 else "all" if stays == 1 else "some")
        assert float(got[i]) == pytest.approx((1 - stays) * theta / factor + stays * theta, rel=1e-5)
    assert kinds == {"none", "some", "all"}


def test_yarn_ramp_keeps_more_than_the_papers_formula() -> None:
    """The known gap between the authors' program (and all checkpoints) and eq. 18 is intended."""
    plain = rotary_frequencies(128)
    program = rotary_frequencies(128, scaling=RopeScaling("yarn", 8.0, 4096, truncate=False))
    formula = rotary_frequencies(128, scaling=RopeScaling("llama3", 8.0, 4096, low=1.0, high=32.0))
    gap = (program - formula) / plain / (1 - 1 / 8)  # of the kept fraction
    assert float(gap.min()) > -1e-5 and 0.3 < float(gap.max()) < 0.4


def test_yarn_scales_scores_by_its_temperature() -> None:
    q, k = randn(2, 1, 1, 1, 64)
    still = torch.zeros(1, dtype=torch.long)  # no rotation at position 0
    rotary = Rotary(64, 1e4, torch.float32, RopeScaling("yarn", 16.0, 2048))
    rotated = (rotary.rotate(x, rotary.tables_at(still)) for x in (q, k))
    want = (0.1 * math.log(16.0) + 1.0) ** 2 * float((q * k).sum())
    assert float(torch.mul(*rotated).sum()) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_rope_scaling_with_factor_one_is_identity(scaling: RopeScaling) -> None:
    one = RopeScaling(scaling.kind, 1.0, scaling.original_length)
    torch.testing.assert_close(rotary_frequencies(32, 1e4, one), rotary_frequencies(32), rtol=1e-6, atol=0)
    assert one.attention_scaling == 1.0


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_bf16_is_close_to_fp32(layout: Layout) -> None:
    x = randn(1, 6, 2, 16)
    low, high = (Rotary(16, 1e4, t, layout=layout, rotary_dim=8) for t in (torch.bfloat16, torch.float32))
    out = low.rotate(x.bfloat16(), low.tables_between(4000, 4006, x.device))
    assert out.dtype == torch.bfloat16
    want = high.rotate(x, high.tables_between(4000, 4006, x.device))
    torch.testing.assert_close(out.float(), want, atol=5e-2, rtol=2e-2)
