"""HSTU attention against a loop over pairs, with and without times."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn.attention.hstu import HSTUAttention, hstu_attention, hstu_attention_reference, time_buckets


def make_layer(**kwargs: object) -> HSTUAttention:
    options = {"head_dim": 6, "v_dim": 5, "max_distance": 7, "n_time_buckets": 12, **kwargs}
    made = HSTUAttention(16, 3, generator=gen(), **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.out.weight, std=0.3, generator=gen(1))
    torch.nn.init.normal_(made.position_bias, generator=gen(2))
    if made.time_bias is not None:
        torch.nn.init.normal_(made.time_bias, generator=gen(3))
    return made


def times_of(batch: int, length: int) -> torch.Tensor:
    """Increasing seconds of this decade, which fp32 cannot resolve."""
    gaps = torch.randint(0, 200, (batch, length), generator=gen(4))
    return 1_780_000_000 + gaps.cumsum(1)


def hstu_by_loop(made: HSTUAttention, x: torch.Tensor, times: torch.Tensor | None) -> torch.Tensor:
    """One row [T, D], pair by pair, from the paper's equations."""
    heads, dk, dv = made.n_heads, made.head_dim, made.v_dim
    mixed = F.silu(x @ made.uvqk.weight.t())
    gate, v, q, k = mixed.split([heads * dv, heads * dv, heads * dk, heads * dk], -1)
    q, k, v = q.view(-1, heads, dk), k.view(-1, heads, dk), v.view(-1, heads, dv)
    rows = []
    for i in range(len(x)):
        summed = torch.zeros(heads, dv)
        for j in range(i + 1):
            score = (q[i] * k[j]).sum(-1) * made.scale + made.position_bias[:, min(i - j, 6)]
            if times is not None:
                score = score + made.time_bias[:, min((int(times[i] - times[j]) + 1).bit_length() - 1, 11)]
            summed += F.silu(score)[:, None] * v[j] / (i + 1)
        flat = summed.flatten()
        normed = (flat - flat.mean()) / (flat.var(unbiased=False) + made.eps).sqrt()
        rows.append(made.out.weight @ (normed * gate[i]))
    return torch.stack(rows)


@pytest.mark.parametrize("timed", [False, True])
def test_hstu_layer_matches_equations_pair_by_pair(timed: bool) -> None:
    made = make_layer(scale=0.7)
    x, times = randn(2, 11, 16, seed=5), times_of(2, 11)
    with torch.no_grad():
        out = made(x, times=times if timed else None)
        want = torch.stack([hstu_by_loop(made, x[b], times[b] if timed else None) for b in range(2)])
    assert_close(out, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_queries", [1, 4, 13])
@pytest.mark.parametrize("packed", [False, True])
def test_hstu_blocks_match_reference_with_gradients(n_queries: int, packed: bool) -> None:
    shapes = ((n_queries, 6), (13, 6), (13, 5))
    q, k, v = (randn(2, 3, *shape, seed=i, grad=True) for i, shape in enumerate(shapes))
    positions, time_bias = randn(3, 7, seed=5, grad=True), randn(3, 12, seed=6, grad=True)
    times, newest = times_of(2, 13), slice(13 - n_queries, 13)
    segments = (torch.arange(13) // 5).expand(2, -1) if packed else None
    distance = (torch.arange(13)[:, None] - torch.arange(13))[newest]
    allowed = (distance >= 0).expand(2, 1, -1, -1)
    if segments is not None:
        allowed = allowed & (segments[:, None, newest, None] == segments[:, None, None, :])
    elapsed = (times[:, :, None] - times[:, None])[:, newest]
    bias = positions[:, distance.clamp(0, 6)] + time_bias[:, time_buckets(elapsed, 12)].transpose(0, 1)
    want = hstu_attention_reference(q, k, v, bias, allowed)
    out = hstu_attention(q, k, v, positions, time_bias, times, segments, block=5)
    assert_same_with_gradients(out, want, (q, k, v, positions, time_bias))


def test_hstu_reference_is_zero_without_allowed_keys() -> None:
    q, k, v = (randn(1, 1, 2, 4, seed=i) for i in range(3))
    out = hstu_attention_reference(q, k, v, torch.zeros(1), torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_time_buckets_double_with_exact_bounds() -> None:
    seconds = torch.tensor([-5, 0, 1, 2, 3, 6, 7, 2**20 - 2, 2**20 - 1, 2**40])
    assert time_buckets(seconds, 32).tolist() == [0, 0, 1, 1, 2, 2, 3, 19, 20, 31]
    assert time_buckets(torch.tensor([0.9, 1.5, 3.1], dtype=torch.float64), 32).tolist() == [0, 1, 2]
    assert math.log2(100 * 365 * 86_400) < 32  # a century
