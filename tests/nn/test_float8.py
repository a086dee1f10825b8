"""fp8: rounding is the format's, products and gradients are the definition's, and only matrices of blocks use it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whorl.models import Decoder, DecoderConfig
from whorl.nn import Linear, float8

FORMATS = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}  # bits of mantissa, smallest exponent


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of the format, ties to the even one, by arithmetic on one number."""
    if value == 0:
        return 0.0
    digits, least = FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, least)
    step = 2.0 ** (exponent - digits)
    return round(value / step) * step  # Python rounds halves to even


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_rounding_is_the_formats(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    t = torch.randn(500, generator=g) * 10.0 ** torch.randint(-6, 3, (500,), generator=g)
    eight, scale = float8.quantize(t, dtype)
    largest = torch.finfo(dtype).max
    assert float(scale) == pytest.approx(float(t.abs().max()) / largest)
    assert eight.float().abs().max() == largest
    wanted = torch.tensor([rounded(float(x), dtype) for x in t / scale])
    assert torch.equal(eight.float(), wanted)


def values(t: Tensor, dtype: torch.dtype) -> Tensor:
    eight, scale = float8.quantize(t, dtype)
    return eight.float() * scale


def operands(rows: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, rows // 2, 48, generator=g), torch.randn(64, 48, generator=g) * 0.1
    return x.requires_grad_(), w.requires_grad_(), torch.randn(2, rows // 2, 64, generator=g) * 1e-3


def check_product() -> None:
    x, w, upstream = operands()
    y = float8.float8_linear(x, w, None)
    y.backward(upstream)
    x8, w8 = values(x.detach(), float8.FORWARD_DTYPE), values(w.detach(), float8.FORWARD_DTYPE)
    g8 = values(upstream, float8.BACKWARD_DTYPE)
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(y, x8 @ w8.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, g8 @ w8, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(w.grad, g8.flatten(0, 1).T @ x8.flatten(0, 1), rtol=1e-4, atol=1e-7)
    exact = x @ w.T
    error = (y - exact).norm() / exact.norm()
    assert 0.005 < error < 0.06  # it is eight bits, and no less


def test_products_and_gradients_are_those_of_the_definition() -> None:
    check_product()


def test_on_a_gpu_operands_lie_as_its_product_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that no test can run here, with a stand-in that insists on what cuBLAS insists on."""
    calls = []

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert not any(extent % 16 for extent in (*a.shape, *b.shape))
        assert a.dtype in FORMATS and b.dtype == torch.float8_e4m3fn and scale_a.shape == scale_b.shape == ()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        calls.append((a.dtype, use_fast_accum))
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(float8, "is_native", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    check_product()
    assert calls == [(torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.float8_e5m2, False)]


def test_rows_that_do_not_fit_are_multiplied_as_usual() -> None:
    x, w, _ = operands()
    few = x[0, :5]
    assert torch.equal(float8.float8_linear(few, w, None), torch.nn.functional.linear(few, w))
    assert float8.float8_linear(x[:, :0], w, None).shape == (2, 0, 64)


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    x, w, _ = operands()
    assert float8.float8_linear(torch.zeros(16, 48), w, None).abs().max() == 0
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            spoilt = x.detach().clone()
            spoilt[0, 0, 0] = bad
        assert not float8.float8_linear(spoilt, w, None).isfinite().all()


def test_only_matrices_of_blocks_use_it() -> None:
    shape = DecoderConfig(
        vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, mlp_hidden=64
    )
    model = Decoder(shape)
    names = float8.use_float8(model)
    using = {name for name, m in model.named_modules() if isinstance(m, Linear) and m.matmul is not None}
    assert set(names) == using and len(names) == 2 * 4
    assert all(name.startswith("blocks.") for name in names)
    assert Linear.matmul is None  # of no other model
    gate = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([Linear(32, 1, std=1.0)])})
    assert float8.use_float8(gate) == []
