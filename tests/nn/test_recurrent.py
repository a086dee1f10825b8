"""Recurrent layers against torch's modules, the fused backend against the loop, gradients in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import gen, randn
from torch import nn

from whorl.nn.recurrent import GRU, LSTM, RNN, Recurrent

KINDS = [(RNN, nn.RNN), (LSTM, nn.LSTM), (GRU, nn.GRU)]
OURS = [RNN, LSTM, GRU]


@pytest.mark.parametrize("backend", ["loop", "fused"])
@pytest.mark.parametrize(("kind", "oracle"), KINDS)
def test_recurrent_layers_match_torch_with_gradients(
    kind: type[Recurrent], oracle: Any, backend: Any
) -> None:
    torch.manual_seed(0)
    theirs = oracle(6, 8, batch_first=True)
    ours = kind(6, 8, backend=backend)
    with torch.no_grad():
        ours.inward.weight.copy_(theirs.weight_ih_l0)
        ours.recurrent.weight.copy_(theirs.weight_hh_l0)
        if ours.recurrent.bias is None:
            ours.inward.bias.copy_(theirs.bias_ih_l0 + theirs.bias_hh_l0)
        else:
            ours.inward.bias.copy_(theirs.bias_ih_l0)
            ours.recurrent.bias.copy_(theirs.bias_hh_l0)
    assert ours.out is not None
    nn.init.orthogonal_(ours.out.weight, generator=gen(3))
    x = torch.randn(3, 11, 6, generator=gen(), requires_grad=True)
    upstream = randn(3, 11, 6, seed=1)
    y, want = ours(x), theirs(x)[0] @ ours.out.weight.t()
    torch.testing.assert_close(y, want, atol=2e-6, rtol=1e-5)
    weights = lambda m, a, b: (x, a, b, m)  # noqa: E731
    got = torch.autograd.grad(
        y, weights(ours.inward.bias, ours.inward.weight, ours.recurrent.weight), upstream
    )
    expected = torch.autograd.grad(
        want, weights(theirs.bias_ih_l0, theirs.weight_ih_l0, theirs.weight_hh_l0), upstream
    )
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", OURS)
def test_fused_backend_matches_loop_from_any_state(kind: type[Recurrent]) -> None:
    outputs = []
    for backend in ("loop", "fused"):
        layer = kind(8, backend=backend, generator=gen())  # type: ignore[arg-type]
        state = layer.new_state(2, 0)
        x = torch.randn(2, 9, 8, generator=gen(1), requires_grad=True)
        y = torch.cat([layer(x[:, :4], state=state), layer(x[:, 4:], state=state)], dim=1)
        (y * torch.randn(y.shape, generator=gen(2))).sum().backward()
        outputs.append([y, x.grad, *state.hidden, *(p.grad for p in layer.parameters())])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", OURS)
def test_recurrent_layers_pass_gradcheck_with_borders(kind: type[Recurrent]) -> None:
    layer = kind(3, 2, generator=gen()).double()
    assert layer.out is not None
    nn.init.orthogonal_(layer.out.weight, generator=gen(3))
    x = torch.randn(2, 4, 3, generator=gen(1), dtype=torch.float64, requires_grad=True)
    segments = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, segments=segments), (x, *layer.parameters()))


@pytest.mark.parametrize("kind", OURS)
def test_recurrent_bf16_is_fp32_rounded_once(kind: type[Recurrent]) -> None:
    layer = kind(8, generator=gen())
    x = randn(2, 30, 8, seed=1).bfloat16()
    assert torch.equal(layer(x), layer(x.float()).bfloat16())


def test_lstm_starts_with_forget_bias_and_orthogonal_u() -> None:
    layer = LSTM(8, generator=gen())
    assert layer.inward.bias is not None
    assert layer.inward.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
    for block in layer.recurrent.weight.split(8):
        torch.testing.assert_close(block @ block.t(), torch.eye(8), atol=1e-5, rtol=0)


def test_lstm_learns_to_keep_the_first_symbol() -> None:
    layer, head = LSTM(8, 16, generator=gen()), nn.Linear(8, 2)
    nn.init.zeros_(head.bias), nn.init.normal_(head.weight, generator=gen(5))
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    loss = torch.tensor(9.0)
    for step in range(80):
        label = torch.randint(2, (32,), generator=gen(step))
        x = torch.randn(32, 20, 8, generator=gen(1000 + step)) * 0.3
        x[:, 0, 0] = 3.0 * (2 * label - 1)
        loss = nn.functional.cross_entropy(head(layer(x)[:, -1]), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
