"""Quantized weights: each format against its definition, each kernel against the dequantized product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.nn.checks import gen, randn

from whorl.nn import Linear, NGramEmbedding
from whorl.nn import quantized_linear as quantized
from whorl.nn.quantized_linear import QuantizedLinear, QuantizedNGramEmbedding, WeightFormat


def make_linear(d_in: int, d_out: int, bias: bool = False) -> Linear:
    made = Linear(d_in, d_out, std=d_in**-0.5, bias=bias, generator=gen())
    if made.bias is not None:
        torch.nn.init.normal_(made.bias, generator=gen(1))
    return made


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=40)
def test_int4_packing_round_trips_with_earlier_column_low(rows: int, pairs: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, 2 * pairs), generator=gen(seed), dtype=torch.int8)
    packed = quantized.pack_int4(codes)
    assert packed.shape == (rows, pairs) and packed.dtype == torch.uint8
    assert torch.equal(quantized.unpack_int4(packed), codes)
    assert int(packed[0, 0]) & 15 == int(codes[0, 0]) + 8


@pytest.mark.parametrize(("kind", "low", "high"), [("int8", -127, 127), ("int4", -8, 7)])
@pytest.mark.parametrize("group", [None, 4])
def test_codes_are_the_nearest_integers(kind: WeightFormat, low: int, high: int, group: int | None) -> None:
    weight = randn(3, 12)
    scales = quantized.compute_scales(weight, kind, group)
    codes = quantized.encode(weight, scales, kind)
    steps = scales.repeat_interleave(group or 12, 1)[..., None]
    levels = torch.arange(low, high + 1) * steps  # [3, 12, levels]
    assert torch.equal(codes.long(), (levels - weight[..., None]).abs().argmin(-1) + low)
    assert torch.allclose(
        quantized.dequantize(codes, scales)[1, 5], codes[1, 5] * scales[1, 5 // (group or 12)]
    )


def test_largest_weight_is_exact_for_both_signs() -> None:
    weight = torch.tensor([[0.1, -0.2, 0.8, 0.3], [0.1, -0.8, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0]])
    for kind in ("int8", "int4"):
        scales = quantized.compute_scales(weight, kind)
        back = quantized.dequantize(quantized.encode(weight, scales, kind), scales)
        assert torch.allclose(back[0, 2], weight[0, 2]) and torch.allclose(back[1, 1], weight[1, 1])
        assert torch.equal(back[2], weight[2]) and (scales != 0).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("group", [None, 32])
def test_quantized_linear_multiplies_dequantized_weights(kind: WeightFormat, group: int | None) -> None:
    plain, x = make_linear(64, 32, bias=True), randn(2, 5, 64, seed=2)
    made = QuantizedLinear.from_linear(plain, kind, group)
    assert torch.allclose(made(x), x @ made.weight.t() + plain.bias, atol=1e-5)
    # An error of at most half a step; fp8 keeps four bits of mantissa.
    step = made.scales.abs().repeat_interleave(64 // made.scales.shape[1], 1)
    bound = {"int8": 0.5 * step, "int4": step, "fp8": plain.weight.abs() / 16 + step / 512}[kind]
    assert ((made.weight - plain.weight).abs() <= bound + 1e-6).all()
    assert made(torch.zeros(0, 64)).shape == (0, 32)


KINDS = [("int8", None), ("int4", 32), ("int4", 64), ("int8", "dynamic"), ("fp8", "dynamic")]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, group", KINDS)
def test_every_kernel_matches_dequantized_product(
    kind: Any, group: Any, dtype: torch.dtype, rows: int
) -> None:
    dynamic = group == "dynamic"
    linear = make_linear(128, 64)
    made = QuantizedLinear.from_linear(linear, kind, None if dynamic else group, dynamic=dynamic)
    x = randn(rows, 128, seed=2).to(dtype)
    made.kernel = "dequantize"
    want = made(x).float()
    forced = [name for name, kernel in quantized.KERNELS.items() if kernel.fits(made, x)]
    for name in [*forced, "auto"]:
        made.kernel = name
        assert made(x).dtype == dtype
        error = (made(x).float() - want).abs().max() / want.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 0.02), name
    expected = {"torch"} if dtype == torch.bfloat16 and not dynamic else set()
    expected |= {"int8"} if dynamic and kind == "int8" else set()
    assert set(forced) == {"dequantize"} | expected


def test_dynamic_quantizes_rows_and_sums_integers() -> None:
    x = randn(4, 32, seed=2) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    codes, scale = quantized.quantize_rows(x)
    assert (codes[:3].abs().amax(1) == 127).all() and not codes[3].any()
    assert ((codes * scale - x).abs() <= 0.5 * scale + 1e-12).all()
    made = QuantizedLinear.from_linear(make_linear(32, 8), "int8", dynamic=True)
    sums = (codes.long()[:, None] * made.codes.long()).sum(-1)  # [4, 8], exact
    assert torch.allclose(made(x), scale * made.scales.view(-1) * sums, rtol=1e-5, atol=1e-7)
    assert torch.equal(made(x)[1:2], made(x[1:2]))  # independent of the batch


def test_quantized_ngram_embedding_is_close_per_row() -> None:
    embedding = NGramEmbedding((2, 3), 50, 8)
    for table in embedding.tables:
        table.data = randn(50, 8) * torch.arange(50)[:, None]
    made = QuantizedNGramEmbedding.from_embedding(embedding)
    ids = torch.randint(0, 30, (2, 12), generator=gen())
    segments = (torch.arange(12) > 6).long().expand(2, -1)
    for more in ({}, {"segments": segments}, {"prefix_ids": torch.tensor([[3, 4], [5, 6]])}):
        want = embedding(ids, **more)
        assert torch.allclose(made(ids, **more), want, atol=2 * 50 * 4 / 254)
        assert (made(ids, **more) - want).abs().max() > 0
