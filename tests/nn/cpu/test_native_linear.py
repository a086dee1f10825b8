"""The C++ weight gradient, in each variant of its products, against torch in fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from tests.support.nn.checks import gen
from tests.support.nn.cpu import VARIANTS, build_variant, dtype_of

from whorl.engine.cpu import build as engine_build
from whorl.engine.cpu import layout
from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import FORCE
from whorl.nn import Linear
from whorl.nn.cpu import linear as native
from whorl.objectives.next_token import next_token


@pytest.fixture(params=VARIANTS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    found = build_variant("weight_gradient", request.param)
    monkeypatch.setattr(native, "library", lambda _dtype: found)
    monkeypatch.setattr(native, "_chosen", {})
    return dtype_of(request.param)


@pytest.mark.parametrize("shape", [(32, 32, 32), (320, 64, 160), (64, 512, 32)], ids=str)
def test_weight_gradient_matches_product(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, inner, outer = shape
    x, d_y = (torch.randn(rows, n, generator=gen(n)).to(dtype) for n in (inner, outer))
    found = native.weight_gradient_kernel(d_y, x)
    torch.testing.assert_close(found.double(), d_y.double().t() @ x.double(), rtol=1e-5, atol=1e-4)


def test_emulated_tiles_are_not_shared_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's last product has one row; the library of training in the same thread multiplies whole tiles."""
    engine = engine_build.library()
    matrix = layout.make_matrix("bfloat16", None, 32, 32)
    arena = layout.Arena(engine, [matrix])
    weight, row, y = torch.eye(32), torch.ones(1, 32), torch.zeros(1, 32)
    engine.whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, 1)
    step, matrix.method = engine.whorl_open(), layout.METHODS["emulated tiles"]
    engine.whorl_product(step, ctypes.byref(matrix), row.data_ptr(), 1, y.data_ptr(), 0, 0.0, 1)
    engine.whorl_close(step)
    assert y.eq(1).all() and arena.n_bytes > 0
    found = build_variant("weight_gradient", "emulated tiles")
    monkeypatch.setattr(native, "library", lambda _dtype: found)
    x, d_y = (torch.randn(32, 32, generator=gen(n)).bfloat16() for n in (1, 2))
    want = d_y.double().t() @ x.double()
    torch.testing.assert_close(native.weight_gradient_kernel(d_y, x).double(), want, rtol=1e-5, atol=1e-4)


def test_layer_and_head_take_the_selected_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(32, 64, std=0.1, generator=gen(1))
    x = torch.randn(2, 32, 32, generator=gen(2)).to(dtype).requires_grad_()
    targets, mask = torch.arange(64), torch.ones(64, dtype=torch.bool)
    grads, calls = [], []
    kernel = native.weight_gradient_kernel
    monkeypatch.setattr(native, "weight_gradient_kernel", lambda *args: calls.append(1) or kernel(*args))
    for chosen in (False, True):
        native.select((64, 32, 64), dtype, chosen)
        hidden = layer(x)[..., :32].flatten(0, 1)
        loss = next_token(hidden, layer.weight, targets, mask, weight_gradient=native.weight_gradient).total
        grads.append(torch.autograd.grad(loss, (x, layer.weight)))
        assert len(calls) == 2 * chosen
    for found, want in zip(grads[1], grads[0], strict=True):
        assert found.dtype == want.dtype
        assert float((found - want).norm() / want.norm()) < 0.01


def test_shapes_that_tiles_cannot_cover_stay_with_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "linear=native")
    torch.set_num_threads(1)
    assert native.choose_weight_gradient((64, 32, 32), dtype) == "native"
    with pytest.raises(kernel_choice.ConfigError, match="native"):
        native.choose_weight_gradient((64, 40, 32), dtype)
