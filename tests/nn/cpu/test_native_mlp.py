"""The C++ MLP, in each variant of its products, against the definition in fp64."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import gen
from tests.support.nn.cpu import VARIANTS, build_variant, dtype_of

from whorl.machine.kernel_choice import FORCE
from whorl.nn import mlp
from whorl.nn.cpu import mlp as native


@pytest.fixture(params=VARIANTS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    found = build_variant("mlp", request.param)
    monkeypatch.setattr(native, "library", lambda _dtype: found)
    monkeypatch.setattr(native, "_chosen", {})
    return dtype_of(request.param)


def layer(d: int, hidden: int, bias: bool = False) -> mlp.MLP:
    made = mlp.MLP(d, hidden, "relu2", gen(1), bias=bias)
    torch.nn.init.normal_(made.down.weight, std=hidden**-0.5, generator=gen(2))
    return made


@pytest.mark.parametrize(
    ("rows", "d", "hidden"),
    [(32, 32, 32), (96, 64, 160), (160, 96, 32), (544, 1024, 32)],  # the last has several sections of rows
    ids=str,
)
def test_native_mlp_matches_definition(dtype: torch.dtype, rows: int, d: int, hidden: int) -> None:
    x, d_y = torch.randn(2, 2, rows // 2, d, generator=gen(3)).to(dtype)
    made = layer(d, hidden)
    inputs = (x.requires_grad_(), made.up.weight, made.down.weight)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = (exact[0] @ exact[1].mT).relu().square() @ exact[2].mT
    expected = (want, *torch.autograd.grad(want, exact, d_y.double()))
    native._chosen[dtype, rows, d, hidden] = True
    found = made(x)
    error = 0.008 if dtype == torch.bfloat16 else 2e-6
    for tensor, exactly in zip((found, *torch.autograd.grad(found, inputs, d_y)), expected, strict=True):
        assert float((tensor.double() - exactly).detach().norm() / exactly.detach().norm()) < error
        assert tensor.shape == exactly.shape


def test_mlp_takes_the_selected_path(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    x, made = torch.zeros(32, 64, dtype=dtype), layer(64, 32)
    threads = torch.get_num_threads()
    try:
        for count, way, expected in ((1, "native", [32]), (1, "torch", []), (2, "torch", [])):
            torch.set_num_threads(count)
            monkeypatch.setenv(FORCE, f"mlp={way}")
            assert mlp.choose_path(32, 64, 32, dtype) == way
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(native, "mlp", lambda x, _up, _down: calls.append(len(x)) or x)
                for network, rows in (
                    (made, x),
                    (layer(64, 32, bias=True), x),
                    (made, x.double()),
                    (made, x[:31]),
                ):
                    network(rows)
            assert calls == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("rows", "d", "threads"), [(33, 64, 1), (32, 1 << 18, 1), (32, 64, 2)])
def test_unsupported_shapes_are_left_to_torch(
    dtype: torch.dtype, rows: int, d: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "fastest", lambda name, candidates, **_: ",".join(candidates))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert mlp.choose_path(rows, d, 32, dtype) == "torch"
    finally:
        torch.set_num_threads(before)
