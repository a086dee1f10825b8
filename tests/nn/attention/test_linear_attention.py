"""The chunked and the recurrent form against the quadratic definition; borders empty the memory."""

from __future__ import annotations

import pytest
import torch

from whorl.errors import ConfigError
from whorl.nn.attention.linear import (
    LinearAttention,
    elu_features,
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer(**kwargs: object) -> LinearAttention:
    made = LinearAttention(24, 3, generator=gen(), **kwargs)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.out.weight, std=0.2, generator=gen(1))
    return made


def test_the_definition_is_the_loop_of_the_paper() -> None:
    q, k = (torch.rand(1, 1, 6, 4, generator=gen(i)) + 0.1 for i in range(2))
    v = torch.randn(1, 1, 6, 3, generator=gen(2))
    out = linear_attention_reference(q, k, v, torch.tensor([0.9]).log())
    for i in range(6):
        weights = [float(q[0, 0, i] @ k[0, 0, j]) * 0.9 ** (i - j) for j in range(i + 1)]
        want = sum(w * v[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(out[0, 0, i], want, atol=1e-5, rtol=1e-4)


def test_features_are_those_of_elu_and_never_zero() -> None:
    x = torch.linspace(-8, 8, 101)
    torch.testing.assert_close(elu_features(x), torch.nn.functional.elu(x) + 1, atol=1e-6, rtol=1e-6)
    assert float(elu_features(torch.tensor(-30.0))) > 0
    x = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
    elu_features(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 8, 29])
def test_three_forms_agree_with_gradients(decayed: bool, packed: bool, length: int) -> None:
    q, k, v = (torch.randn(2, 3, length, d, generator=gen(i)) for i, d in enumerate((6, 6, 5)))
    q, k = elu_features(q), elu_features(k)
    log_decay = torch.tensor([0.99, 0.8, 0.3]).log() if decayed else None
    # Borders inside of chunks, at their ends, and a document longer than a chunk.
    segments = torch.tensor([[0] * 3 + [1] * 5 + [2] * 18 + [3] * 3, [0] * 16 + [4] + [5] * 12])[:, :length]
    runs = torch.cat([torch.zeros(2, 1, dtype=torch.long), (segments.diff(dim=1) != 0).cumsum(1)], 1)
    leaves = [t.requires_grad_() for t in (q, k, v, log_decay) if t is not None]

    want = linear_attention_reference(q, k, v, log_decay, segments if packed else None)
    chunked, memory = linear_attention(
        q, k, v, torch.zeros(2, 3, 6, 6), log_decay, runs if packed else None, chunk=8
    )
    torch.testing.assert_close(chunked, want, atol=1e-5, rtol=1e-4)
    upstream = torch.randn(want.shape, generator=gen(9))
    for ours, theirs in zip(
        torch.autograd.grad(chunked, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)

    stepped, outs = torch.zeros(2, 3, 6, 6), []
    for t in range(length):
        if packed and t:
            stepped = stepped * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        y, stepped = linear_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], stepped, log_decay)
        outs.append(y)
    torch.testing.assert_close(torch.stack(outs, 2), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stepped, memory, atol=1e-5, rtol=1e-4)


def test_a_long_sum_is_exact_because_the_memory_is_fp32() -> None:
    made = layer(chunk=16).to(torch.float32)
    x = torch.randn(1, 1000, 24, generator=gen(5))
    x = torch.cat([x, x + 0.0], dim=1).bfloat16()
    low, full = made(x).float(), made(x.float())
    error = (low - full).norm() / full.norm()
    assert (
        float(error.detach()) < 0.02
    )  # the rounding of inputs and outputs, not a sum that has stopped growing


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pieces", [(1, 3, 18), (1,) * 22, (22,)])
def test_a_row_in_pieces_equals_the_row(decay: bool, packed: bool, pieces: tuple[int, ...]) -> None:
    made = layer(decay=decay, chunk=4)
    x = torch.randn(2, 22, 24, generator=gen(3))
    segments = torch.tensor([[7] * 5 + [8] * 17, [1] * 22]) if packed else None
    whole = made(x, segments=segments)
    state, outs, start = made.new_state(2, 22), [], 0
    n_bytes = state.n_bytes
    for n in pieces:
        cut = None if segments is None else segments[:, start : start + n]
        outs.append(made(x[:, start : start + n], segments=cut, state=state))
        start += n
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-4)
    assert state.length == 22 and state.recurrent_state.dtype == torch.float32
    assert n_bytes == 2 * 3 * 8 * 9 * 4 and state.n_bytes == n_bytes + (16 if packed else 0)


def test_a_packed_row_equals_its_documents() -> None:
    made = layer(decay=True, chunk=4)
    docs = [torch.randn(1, n, 24, generator=gen(n)) for n in (5, 3, 9)]
    segments = torch.tensor([[1] * 5 + [2] * 3 + [1] * 9])  # an id that returns is a new document
    packed = made(torch.cat(docs, 1), segments=segments)
    torch.testing.assert_close(packed, torch.cat([made(d) for d in docs], 1), atol=1e-5, rtol=1e-4)


def test_the_past_alone_is_seen_and_every_parameter_learns() -> None:
    made = layer(decay=True, chunk=4)
    x = torch.randn(2, 10, 24, generator=gen(3))
    y = made(x)
    other = x.clone()
    other[:, 6:] += 1
    torch.testing.assert_close(made(other)[:, :6], y[:, :6])
    assert not torch.allclose(made(other)[:, 6:], y[:, 6:])
    (y * torch.randn(y.shape, generator=gen(4))).sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_decay_starts_at_the_values_of_retnet() -> None:
    made = layer(decay=True)
    assert made.decay is not None
    torch.testing.assert_close(torch.sigmoid(made.decay), torch.tensor([31 / 32, 63 / 64, 127 / 128]))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_heads is 5"):
        LinearAttention(24, 5)
    with pytest.raises(ConfigError, match="chunk is 0"):
        LinearAttention(24, 3, chunk=0)
