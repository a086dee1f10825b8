"""Recurrent layers against torch's modules, the fused backend against the loop, gradients in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import copy_values, gen, randn
from torch import nn
from torch.testing import assert_close

from whorl.nn.recurrent import GRU, LSTM, RNN, Recurrent

KINDS = [(RNN, nn.RNN), (LSTM, nn.LSTM), (GRU, nn.GRU)]
OURS = [RNN, LSTM, GRU]


@pytest.mark.parametrize("backend", ["loop", "fused"])
@pytest.mark.parametrize(("kind", "oracle"), KINDS)
def test_recurrent_layers_match_torch_with_gradients(kind: Any, oracle: Any, backend: Any) -> None:
    torch.manual_seed(0)
    theirs, ours = oracle(6, 8, batch_first=True), kind(6, 8, backend=backend)
    copy_values({ours.inward.weight: theirs.weight_ih_l0, ours.recurrent.weight: theirs.weight_hh_l0})
    if ours.recurrent.bias is None:
        copy_values({ours.inward.bias: theirs.bias_ih_l0 + theirs.bias_hh_l0})
    else:
        copy_values({ours.inward.bias: theirs.bias_ih_l0, ours.recurrent.bias: theirs.bias_hh_l0})
    nn.init.orthogonal_(ours.out.weight, generator=gen(3))
    x, upstream = randn(3, 11, 6, grad=True), randn(3, 11, 6, seed=1)
    y, want = ours(x), theirs(x)[0] @ ours.out.weight.t()
    assert_close(y, want, atol=2e-6, rtol=1e-5)
    our_leaves = (x, ours.inward.weight, ours.recurrent.weight, ours.inward.bias)
    their_leaves = (x, theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0)
    got, expected = (torch.autograd.grad(*of, upstream) for of in ((y, our_leaves), (want, their_leaves)))
    assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", OURS)
def test_fused_backend_matches_loop_from_any_state(kind: type[Recurrent]) -> None:
    outputs = []
    for backend in ("loop", "fused"):
        layer = kind(8, backend=backend, generator=gen())  # type: ignore[arg-type]
        state = layer.new_state(2, 0)
        x = randn(2, 9, 8, seed=1, grad=True)
        y = torch.cat([layer(x[:, :4], state=state), layer(x[:, 4:], state=state)], dim=1)
        (y * randn(*y.shape, seed=2)).sum().backward()
        outputs.append([y, x.grad, *state.hidden, *(p.grad for p in layer.parameters())])
    assert_close(*outputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", OURS)
def test_recurrent_layers_pass_gradcheck_with_borders(kind: type[Recurrent]) -> None:
    layer = kind(3, 2, generator=gen()).double()
    nn.init.orthogonal_(layer.out.weight, generator=gen(3))
    x = randn(2, 4, 3, seed=1, dtype=torch.float64, grad=True)
    segments = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, segments=segments), (x, *layer.parameters()))


@pytest.mark.parametrize("kind", OURS)
def test_recurrent_bf16_is_fp32_rounded_once(kind: type[Recurrent]) -> None:
    layer = kind(8, generator=gen())
    x = randn(2, 30, 8, seed=1).bfloat16()
    assert torch.equal(layer(x), layer(x.float()).bfloat16())


def test_lstm_starts_with_forget_bias_and_orthogonal_u() -> None:
    layer = LSTM(8, generator=gen())
    assert layer.inward.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
    for block in layer.recurrent.weight.split(8):
        assert_close(block @ block.t(), torch.eye(8), atol=1e-5, rtol=0)
