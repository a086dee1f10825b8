"""Quantized weights: each format against its definition, each kernel against the dequantized product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.nn import Linear, NGramEmbedding
from whorl.nn.quantized_linear import (
    KERNELS,
    QuantizedLinear,
    QuantizedNGramEmbedding,
    WeightFormat,
    compute_scales,
    dequantize,
    encode,
    pack_int4,
    quantize_rows,
    unpack_int4,
)


def make_linear(d_in: int, d_out: int, bias: bool = False, seed: int = 0) -> Linear:
    made = Linear(d_in, d_out, std=d_in**-0.5, bias=bias, generator=torch.Generator().manual_seed(seed))
    if made.bias is not None:
        made.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    return made


def draw(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_int4_packing_round_trips_with_earlier_column_low(rows: int, pairs: int, seed: int) -> None:
    codes = torch.randint(
        -8, 8, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )
    packed = pack_int4(codes)
    assert packed.shape == (rows, pairs) and packed.dtype == torch.uint8
    assert torch.equal(unpack_int4(packed), codes)
    assert int(packed[0, 0]) & 15 == int(codes[0, 0]) + 8


@pytest.mark.parametrize(("kind", "low", "high"), [("int8", -127, 127), ("int4", -8, 7)])
@pytest.mark.parametrize("group", [None, 4])
def test_codes_are_the_nearest_integers(kind: WeightFormat, low: int, high: int, group: int | None) -> None:
    weight = draw(3, 12)
    scales = compute_scales(weight, kind, group)
    codes = encode(weight, scales, kind)
    for o in range(3):
        for i in range(12):
            scale = float(scales[o, i // (group or 12)])
            best = min(range(low, high + 1), key=lambda c: abs(c * scale - float(weight[o, i])))
            assert int(codes[o, i]) == best
    assert torch.allclose(dequantize(codes, scales)[1, 5], codes[1, 5] * scales[1, 5 // (group or 12)])


def test_largest_weight_is_exact_for_both_signs() -> None:
    weight = torch.tensor([[0.1, -0.2, 0.8, 0.3], [0.1, -0.8, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0]])
    for kind in ("int8", "int4"):
        scales = compute_scales(weight, kind)
        back = dequantize(encode(weight, scales, kind), scales)
        assert torch.allclose(back[0, 2], weight[0, 2]) and torch.allclose(back[1, 1], weight[1, 1])
        assert torch.equal(back[2], weight[2]) and (scales != 0).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("group", [None, 32])
def test_quantized_linear_multiplies_dequantized_weights(kind: WeightFormat, group: int | None) -> None:
    plain, x = make_linear(64, 32, bias=True), draw(2, 5, 64)
    made = QuantizedLinear.from_linear(plain, kind, group)
    assert plain.bias is not None
    assert torch.allclose(made(x), x @ made.weight.t() + plain.bias, atol=1e-5)
    # An error of at most half a step; fp8 keeps four bits of mantissa.
    step = made.scales.abs().repeat_interleave(64 // made.scales.shape[1], 1)
    bound = {"int8": 0.5 * step, "int4": step, "fp8": plain.weight.abs() / 16 + step / 512}[kind]
    assert ((made.weight - plain.weight).abs() <= bound + 1e-6).all()
    assert made(torch.zeros(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "group", "dynamic"),
    [
        ("int8", None, False),
        ("int4", 32, False),
        ("int4", 64, False),
        ("int8", None, True),
        ("fp8", None, True),
    ],
)
def test_every_kernel_matches_dequantized_product(
    kind: WeightFormat, group: int | None, dynamic: bool, dtype: torch.dtype, rows: int
) -> None:
    made, x = (
        QuantizedLinear.from_linear(make_linear(128, 64), kind, group, dynamic=dynamic),
        draw(rows, 128).to(dtype),
    )
    made.kernel = "dequantize"
    want = made(x).float()
    forced = [name for name, kernel in KERNELS.items() if kernel.fits(made, x)]
    for name in [*forced, "auto"]:
        made.kernel = name
        assert made(x).dtype == dtype
        error = (made(x).float() - want).abs().max() / want.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 0.02), name
    expected = {"torch"} if dtype == torch.bfloat16 and not dynamic else set()
    expected |= {"int8"} if dynamic and kind == "int8" else set()
    assert set(forced) == {"dequantize"} | expected


def test_dynamic_quantizes_rows_and_sums_integers() -> None:
    x = draw(4, 32) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    codes, scale = quantize_rows(x)
    assert (codes[:3].abs().amax(1) == 127).all() and not codes[3].any()
    assert ((codes * scale - x).abs() <= 0.5 * scale + 1e-12).all()
    made = QuantizedLinear.from_linear(make_linear(32, 8), "int8", dynamic=True)
    want = [
        [
            float(scale[n]) * float(made.scales[o])
            * sum(int(a) * int(b) for a, b in zip(codes[n], made.codes[o], strict=True))
            for o in range(8)
        ]
        for n in range(4)
    ]  # fmt: skip
    assert torch.allclose(made(x), torch.tensor(want), rtol=1e-5, atol=1e-7)
    assert torch.equal(made(x)[1:2], made(x[1:2]))  # independent of the batch


def test_quantized_ngram_embedding_is_close_per_row() -> None:
    embedding = NGramEmbedding((2, 3), 50, 8)
    for table in embedding.tables:
        table.data = draw(50, 8) * torch.arange(50)[:, None]
    made, ids = (
        QuantizedNGramEmbedding.from_embedding(embedding),
        torch.randint(0, 30, (2, 12), generator=torch.Generator().manual_seed(0)),
    )
    segments = (torch.arange(12) > 6).long().expand(2, -1)
    for more in ({}, {"segments": segments}, {"prefix_ids": torch.tensor([[3, 4], [5, 6]])}):
        want = embedding(ids, **more)
        assert torch.allclose(made(ids, **more), want, atol=2 * 50 * 4 / 254)
        assert (made(ids, **more) - want).abs().max() > 0
