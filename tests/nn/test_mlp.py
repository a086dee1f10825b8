"""Each kind of MLP against its formula."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from tests.support.nn.checks import gen, randn
from torch import Tensor

from whorl.nn.mlp import MLP, Activation, activate


def by_formula(h: Tensor, gate: Tensor, kind: Activation) -> Tensor:
    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def gelu_tanh(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    quick = h / (1 + torch.exp(-1.702 * h))
    plain = {"relu2": h.clamp(min=0) ** 2, "gelu": gelu(h), "gelu_tanh": gelu_tanh(h), "quick_gelu": quick}
    return {**plain, "swiglu": gate * torch.sigmoid(gate) * h, "geglu": gelu_tanh(gate) * h}[kind]


@pytest.mark.parametrize("kind", get_args(Activation))
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_matches_formula_and_trains_every_parameter(kind: Activation, bias: bool) -> None:
    d, hidden = 12, 20
    mlp = MLP(d, hidden, kind, gen(), bias=bias)
    x = 2 * randn(3, 4, d, seed=1)
    assert not mlp(x).any()  # a new block is the identity
    for seed, (_, parameter) in enumerate(mlp.named_parameters()):
        torch.nn.init.normal_(parameter, generator=gen(seed))
    up, b_up = mlp.up.weight, mlp.up.bias if bias else torch.zeros(len(mlp.up.weight))
    gated = kind in ("swiglu", "geglu")
    assert up.shape == (hidden * (2 if gated else 1), d)
    gate = x @ up[:hidden].T + b_up[:hidden]
    h = x @ up[-hidden:].T + b_up[-hidden:]
    want = by_formula(h, gate, kind) @ mlp.down.weight.T + (mlp.down.bias if bias else 0.0)
    out = mlp(x)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=1e-4)

    names = {name for name, _ in mlp.named_parameters()}
    assert names == {"up.weight", "down.weight"} | ({"up.bias", "down.bias"} if bias else set())
    both = [torch.autograd.grad(y, list(mlp.parameters()), randn(*out.shape, seed=3)) for y in (out, want)]
    assert all(bool(gradient.any()) for gradient in both[0])
    torch.testing.assert_close(*both, atol=5e-3, rtol=1e-3)


def test_gelu_approximations_are_close() -> None:
    x = torch.linspace(-6, 6, 10_001)
    gap = (activate(x, "gelu") - activate(x, "gelu_tanh")).abs().max()
    assert 1e-4 < float(gap) < 5e-4
    quick = (activate(x, "gelu") - activate(x, "quick_gelu")).abs().max()
    assert 0.015 < float(quick) < 0.021


@pytest.mark.parametrize("kind", ["relu2", "swiglu"])
def test_mlp_initial_weights_are_independent_of_bias(kind: Activation) -> None:
    plain, biased = MLP(8, 16, kind, gen()), MLP(8, 16, kind, gen(), bias=True)
    assert torch.equal(plain.up.weight, biased.up.weight)
    width = len(plain.up.weight)
    assert torch.equal(plain.up.weight, randn(width, 8) * (0.6 * 8**-0.5))


def test_mlp_returns_bf16_for_bf16() -> None:
    mlp = MLP(8, 16, "geglu", gen(), bias=True)
    assert mlp(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16
