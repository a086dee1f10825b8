"""Linear attention: the chunked and the recurrent form against the quadratic definition."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch.testing import assert_close

from whorl.nn.attention.linear import (
    LinearAttention,
    elu_features,
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)


def make_layer(**kwargs: object) -> LinearAttention:
    made = LinearAttention(24, 3, generator=gen(), **kwargs)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.out.weight, std=0.2, generator=gen(1))
    return made


def test_linear_attention_reference_matches_paper() -> None:
    q, k = (torch.rand(1, 1, 6, 4, generator=gen(i)) + 0.1 for i in range(2))
    v = randn(1, 1, 6, 3, seed=2)
    out = linear_attention_reference(q, k, v, torch.tensor([0.9]).log())
    decay = 0.9 ** (torch.arange(6)[:, None] - torch.arange(6)).tril()
    weights = (q[0, 0] @ k[0, 0].t() * decay).tril()
    assert_close(out[0, 0], weights @ v[0, 0] / weights.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_elu_features_match_elu_and_are_positive() -> None:
    x = torch.linspace(-8, 8, 101)
    assert_close(elu_features(x), torch.nn.functional.elu(x) + 1, atol=1e-6, rtol=1e-6)
    assert float(elu_features(torch.tensor(-30.0))) > 0
    x = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
    elu_features(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 8, 29])
def test_linear_attention_forms_agree_with_gradients(decayed: bool, packed: bool, length: int) -> None:
    q, k, v = (randn(2, 3, length, d, seed=i) for i, d in enumerate((6, 6, 5)))
    q, k = elu_features(q), elu_features(k)
    log_decay = torch.tensor([0.99, 0.8, 0.3]).log() if decayed else None
    # Borders inside chunks and at their ends, and a document longer than a chunk.
    segments = torch.tensor([[0] * 3 + [1] * 5 + [2] * 18 + [3] * 3, [0] * 16 + [4] + [5] * 12])[:, :length]
    runs = torch.cat([torch.zeros(2, 1, dtype=torch.long), (segments.diff(dim=1) != 0).cumsum(1)], 1)
    leaves = [t.requires_grad_() for t in (q, k, v, log_decay) if t is not None]

    want = linear_attention_reference(q, k, v, log_decay, segments if packed else None)
    empty = torch.zeros(2, 3, 6, 6)
    chunked, memory = linear_attention(q, k, v, empty, log_decay, runs if packed else None, chunk=8)
    assert_same_with_gradients(chunked, want, leaves, grad_atol=1e-4, grad_rtol=1e-3)

    stepped, outs = empty, []
    for t in range(length):
        if packed and t:
            stepped = stepped * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        y, stepped = linear_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], stepped, log_decay)
        outs.append(y)
    assert_close(torch.stack(outs, 2), want, atol=1e-5, rtol=1e-4)
    assert_close(stepped, memory, atol=1e-5, rtol=1e-4)


def test_linear_attention_bf16_long_row_is_close_to_fp32() -> None:
    made, x = make_layer(chunk=16), randn(1, 1000, 24, seed=5).repeat(1, 2, 1).bfloat16()
    low, full = made(x).float(), made(x.float())
    error = (low - full).norm() / full.norm()
    assert float(error.detach()) < 0.02  # a bf16 sum would stop growing


def test_linear_attention_decay_starts_as_retnet() -> None:
    made = make_layer(decay=True)
    assert_close(torch.sigmoid(made.decay), torch.tensor([31 / 32, 63 / 64, 127 / 128]))
