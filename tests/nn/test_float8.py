"""fp8 products: rounding of the formats, products and gradients against the definition, selected layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.nn.checks import gen, randn
from tests.support.tiny import make_decoder
from torch import Tensor

from whorl.nn import Linear, float8

FORMATS = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}  # bits of mantissa, smallest exponent


def round_to_format(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of the format, ties to even, by scalar arithmetic."""
    if value == 0:
        return 0.0
    digits, smallest = FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, smallest)
    step = 2.0 ** (exponent - digits)
    return round(value / step) * step  # Python rounds halves to even


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_float8_rounding_matches_format(dtype: torch.dtype) -> None:
    g = gen()
    t = torch.randn(500, generator=g) * 10.0 ** torch.randint(-6, 3, (500,), generator=g)
    eight, scale = float8.quantize(t, dtype)
    largest = torch.finfo(dtype).max
    assert float(scale) == pytest.approx(float(t.abs().max()) / largest)
    assert eight.float().abs().max() == largest
    wanted = torch.tensor([round_to_format(float(x), dtype) for x in t / scale])
    assert torch.equal(eight.float(), wanted)


def dequantized(t: Tensor, dtype: torch.dtype) -> Tensor:
    eight, scale = float8.quantize(t, dtype)
    return eight.float() * scale


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and the upstream gradient."""
    x, w = randn(2, 16, 48, seed=1, grad=True), randn(64, 48, seed=2) * 0.1
    return x, w.requires_grad_(), randn(2, 16, 64, seed=3) * 1e-3


def check_product() -> None:
    x, w, upstream = operands()
    y = float8.float8_linear(x, w, None)
    y.backward(upstream)
    x8, w8 = dequantized(x.detach(), float8.FORWARD_DTYPE), dequantized(w.detach(), float8.FORWARD_DTYPE)
    g8 = dequantized(upstream, float8.BACKWARD_DTYPE)
    torch.testing.assert_close(y, x8 @ w8.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, g8 @ w8, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(w.grad, g8.flatten(0, 1).T @ x8.flatten(0, 1), rtol=1e-4, atol=1e-7)
    exact = x @ w.T
    error = (y - exact).norm() / exact.norm()
    assert 0.005 < error < 0.06  # the error of eight bits


def test_float8_products_and_gradients_match_definition() -> None:
    check_product()


def test_float8_gpu_operands_have_the_required_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU path, with a substitute for `torch._scaled_mm` that checks the requirements of cuBLAS."""
    calls = []

    def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert not any(extent % 16 for extent in (*a.shape, *b.shape))
        assert a.dtype in FORMATS and b.dtype == torch.float8_e4m3fn and scale_a.shape == scale_b.shape == ()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        calls.append((a.dtype, options["use_fast_accum"]))
        return ((a.float() @ b.float()) * scale_a * scale_b).to(options["out_dtype"])

    monkeypatch.setattr(float8, "is_native", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    check_product()
    assert calls == [(torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.float8_e5m2, False)]


def test_float8_unaligned_rows_use_the_input_type() -> None:
    x, w, _ = operands()
    few = x[0, :5]
    assert torch.equal(float8.float8_linear(few, w, None), torch.nn.functional.linear(few, w))
    assert float8.float8_linear(x[:, :0], w, None).shape == (2, 0, 64)


def test_float8_keeps_zeros_and_non_finite_values() -> None:
    x, w, _ = operands()
    assert float8.float8_linear(torch.zeros(16, 48), w, None).abs().max() == 0
    for bad in (math.nan, math.inf):
        damaged = x.detach().clone()
        damaged[0, 0, 0] = bad
        assert not float8.float8_linear(damaged, w, None).isfinite().all()


def test_use_float8_selects_block_matrices_only() -> None:
    model = make_decoder()
    names = float8.use_float8(model)
    using = {name for name, m in model.named_modules() if isinstance(m, Linear) and m.matmul is not None}
    assert set(names) == using and len(names) == 2 * 4
    assert all(name.startswith("blocks.") for name in names)
    assert Linear.matmul is None  # other models are unchanged
    gate = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([Linear(32, 1, std=1.0)])})
    assert float8.use_float8(gate) == []
