"""The loop over time against torch's modules; decoding in pieces, packed rows and the fused path against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from whorl.errors import ConfigError
from whorl.nn.recurrent import GRU, LSTM, RNN, Recurrent

KINDS = [(RNN, nn.RNN), (LSTM, nn.LSTM), (GRU, nn.GRU)]
OURS = [RNN, LSTM, GRU]


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("path", ["loop", "fused"])
@pytest.mark.parametrize(("kind", "oracle"), KINDS)
def test_outputs_and_gradients_are_those_of_torch(kind: type[Recurrent], oracle: Any, path: Any) -> None:
    torch.manual_seed(0)
    theirs = oracle(6, 8, batch_first=True)
    ours = kind(6, 8, backend=path)
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
    upstream = torch.randn(3, 11, 6, generator=gen(1))
    y, want = ours(x), theirs(x)[0] @ ours.out.weight.t()
    close(y, want)
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
def test_the_fused_path_equals_the_loop_from_any_state(kind: type[Recurrent]) -> None:
    outputs = []
    for path in ("loop", "fused"):
        layer = kind(8, backend=path, generator=gen())  # type: ignore[arg-type]
        state = layer.new_state(2, 0)
        x = torch.randn(2, 9, 8, generator=gen(1), requires_grad=True)
        y = torch.cat([layer(x[:, :4], state=state), layer(x[:, 4:], state=state)], dim=1)
        (y * torch.randn(y.shape, generator=gen(2))).sum().backward()
        outputs.append([y, x.grad, *state.hidden, *(p.grad for p in layer.parameters())])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", OURS)
def test_a_row_in_pieces_is_the_row(kind: type[Recurrent], packed: bool) -> None:
    layer = kind(6, generator=gen())
    x = torch.randn(2, 10, 6, generator=gen(1))
    segments = torch.tensor([[0] * 3 + [1] * 7, [4] * 5 + [2, 2] + [4] * 3]) if packed else None
    want = layer(x, segments=segments)
    for pieces in ([1, 3, 6], [1] * 10):
        state, got, size = layer.new_state(2, 10), [], 0
        for n in pieces:
            part = slice(state.length, state.length + n)
            got.append(
                layer(x[:, part], segments=None if segments is None else segments[:, part], state=state)
            )
            size = size or state.n_bytes
        close(torch.cat(got, dim=1), want)
        assert state.length == 10 and state.n_bytes == size, "the state grew"
        assert not any(m.requires_grad for m in state.hidden)


@pytest.mark.parametrize("kind", OURS)
def test_a_packed_row_is_its_documents_alone(kind: type[Recurrent]) -> None:
    layer = kind(6, generator=gen())
    x = torch.randn(1, 12, 6, generator=gen(1), requires_grad=True)
    # The last document has the number of the first: still another document.
    segments = torch.tensor([[1] * 5 + [2] + [3] * 4 + [1] * 2])
    packed = layer(x, segments=segments)
    close(packed, torch.cat([layer(d) for d in x.split([5, 1, 4, 2], dim=1)], dim=1))
    (reached,) = torch.autograd.grad(packed[:, 6:10].sum(), x)
    assert (reached[:, 6:10] != 0).all() and (reached[:, :6] == 0).all() and (reached[:, 10:] == 0).all()


@pytest.mark.parametrize("kind", OURS)
def test_without_segments_a_state_goes_on_in_its_document(kind: type[Recurrent]) -> None:
    layer = kind(6, generator=gen())
    x = torch.randn(1, 8, 6, generator=gen(1))
    segments = torch.tensor([[1] * 3 + [2] * 5])
    state = layer.new_state(1, 8)
    got = torch.cat(
        [layer(x[:, :5], segments=segments[:, :5], state=state), layer(x[:, 5:], state=state)], dim=1
    )
    close(got, layer(x, segments=segments))


@pytest.mark.parametrize("kind", OURS)
def test_gradcheck_with_a_border_inside(kind: type[Recurrent]) -> None:
    layer = kind(3, 2, generator=gen()).double()
    assert layer.out is not None
    nn.init.orthogonal_(layer.out.weight, generator=gen(3))
    x = torch.randn(2, 4, 3, generator=gen(1), dtype=torch.float64, requires_grad=True)
    segments = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, segments=segments), (x, *layer.parameters()))


@pytest.mark.parametrize("kind", OURS)
def test_bf16_is_fp32_rounded_once_at_the_end(kind: type[Recurrent]) -> None:
    layer = kind(8, generator=gen())
    x = torch.randn(2, 30, 8, generator=gen(1)).bfloat16()
    assert torch.equal(layer(x), layer(x.float()).bfloat16())


def test_the_lstm_starts_remembering_and_the_recurrent_weights_orthogonal() -> None:
    layer = LSTM(8, generator=gen())
    assert layer.inward.bias is not None
    assert layer.inward.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
    for block in layer.recurrent.weight.split(8):
        torch.testing.assert_close(block @ block.t(), torch.eye(8), atol=1e-5, rtol=0)


def test_the_lstm_learns_to_remember_a_first_symbol() -> None:
    layer, head = LSTM(8, 16, generator=gen()), nn.Linear(8, 2)
    nn.init.zeros_(head.bias), nn.init.normal_(head.weight, generator=gen(5))
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    loss = torch.tensor(9.0)
    for step in range(80):
        label = torch.randint(2, (32,), generator=gen(step))
        x = torch.randn(32, 20, 8, generator=gen(1000 + step)) * 0.3
        x[:, 0, 0] = 3.0 * (2 * label - 1)
        loss = nn.functional.cross_entropy(head(layer(x)[:, -1]), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="d_hidden is 0"):
        RNN(4, 0)
    with pytest.raises(ConfigError, match="backend is 'quick'"):
        RNN(4, backend="quick")  # type: ignore[arg-type]
    layer = GRU(4, backend="fused")
    with pytest.raises(ConfigError, match="x has the shape"):
        layer(torch.zeros(1, 2, 5))
    with pytest.raises(ConfigError, match="a document begins inside"):
        layer(torch.zeros(1, 2, 4), segments=torch.tensor([[0, 1]]))
    with pytest.raises(ConfigError, match="state is of 2 rows"):
        layer(torch.zeros(1, 2, 4), state=layer.new_state(2, 4))
