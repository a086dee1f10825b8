"""HSTU's attention against a loop over pairs; pieces, packed rows and times."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention.hstu import (
    HSTUAttention,
    hstu_attention,
    hstu_attention_reference,
    time_buckets,
)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer(**kwargs: object) -> HSTUAttention:
    options = {"head_dim": 6, "v_dim": 5, "max_distance": 7, "n_time_buckets": 12, **kwargs}
    made = HSTUAttention(16, 3, generator=gen(), **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.out.weight, std=0.3, generator=gen(1))
    torch.nn.init.normal_(made.position_bias, generator=gen(2))
    if made.time_bias is not None:
        torch.nn.init.normal_(made.time_bias, generator=gen(3))
    return made


def times_of(batch: int, length: int) -> torch.Tensor:
    """Seconds of this decade, growing: fp32 could not hold them."""
    gaps = torch.randint(0, 200, (batch, length), generator=gen(4))
    return 1_780_000_000 + gaps.cumsum(1)


def by_hand(made: HSTUAttention, x: torch.Tensor, times: torch.Tensor | None) -> torch.Tensor:
    """One row [T, D], pair by pair, from the paper's equations."""
    heads, dk, dv = made.n_heads, made.head_dim, made.v_dim
    mixed = F.silu(x @ made.uvqk.weight.t())
    gate, v, q, k = mixed.split([heads * dv, heads * dv, heads * dk, heads * dk], -1)
    q, k, v = q.view(-1, heads, dk), k.view(-1, heads, dk), v.view(-1, heads, dv)
    rows = []
    for i in range(len(x)):
        summed = torch.zeros(heads, dv)
        for j in range(i + 1):
            for h in range(heads):
                score = q[i, h] @ k[j, h] * made.scale + made.position_bias[h, min(i - j, 6)]
                if times is not None:
                    assert made.time_bias is not None
                    passed = int(times[i] - times[j])
                    score = score + made.time_bias[h, min((passed + 1).bit_length() - 1, 11)]
                summed[h] = summed[h] + score * torch.sigmoid(score) * v[j, h] / (i + 1)
        flat = summed.flatten()
        normed = (flat - flat.mean()) / (flat.var(unbiased=False) + made.eps).sqrt()
        rows.append(made.out.weight @ (normed * gate[i]))
    return torch.stack(rows)


@pytest.mark.parametrize("timed", [False, True])
def test_the_layer_equals_the_equations_pair_by_pair(timed: bool) -> None:
    made = layer(scale=0.7)
    x, times = torch.randn(2, 11, 16, generator=gen(5)), times_of(2, 11)
    with torch.no_grad():
        out = made(x, times=times if timed else None)
        want = torch.stack([by_hand(made, x[b], times[b] if timed else None) for b in range(2)])
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_queries", [1, 4, 13])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_equal_the_definition_with_gradients(n_queries: int, packed: bool) -> None:
    q = torch.randn(2, 3, n_queries, 6, generator=gen(), requires_grad=True)
    k, v = (torch.randn(2, 3, 13, d, generator=gen(d), requires_grad=True) for d in (6, 5))
    positions = torch.randn(3, 7, generator=gen(1), requires_grad=True)
    time_bias = torch.randn(3, 12, generator=gen(2), requires_grad=True)
    times = times_of(2, 13)
    segments = (torch.arange(13) // 5).expand(2, -1) if packed else None
    step = torch.arange(13)
    distance = (step[:, None] - step)[13 - n_queries :]
    allowed = (distance >= 0).expand(2, 1, -1, -1)
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])[:, :, 13 - n_queries :]
    passed = (times[:, :, None] - times[:, None])[:, 13 - n_queries :]
    bias = positions[:, distance.clamp(0, 6)] + time_bias[:, time_buckets(passed, 12)].transpose(0, 1)
    leaves = (q, k, v, positions, time_bias)
    want = hstu_attention_reference(q, k, v, bias, allowed)
    out = hstu_attention(q, k, v, positions, time_bias, times, segments, block=5)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    upstream = torch.randn(out.shape, generator=gen(9))
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_nothing_allowed_gives_zero() -> None:
    q, k, v = (torch.randn(1, 1, 2, 4, generator=gen(i)) for i in range(3))
    out = hstu_attention_reference(q, k, v, torch.zeros(1), torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_buckets_double_and_their_bounds_are_exact() -> None:
    seconds = torch.tensor([-5, 0, 1, 2, 3, 6, 7, 2**20 - 2, 2**20 - 1, 2**40])
    assert time_buckets(seconds, 32).tolist() == [0, 0, 1, 1, 2, 2, 3, 19, 20, 31]
    assert time_buckets(torch.tensor([0.9, 1.5, 3.1], dtype=torch.float64), 32).tolist() == [0, 1, 2]
    assert math.log2(100 * 365 * 86_400) < 32  # a century


def test_frequency_is_seen_where_a_softmax_would_not_see_it() -> None:
    """Before the norm, twice the matching events among as many positions give twice the sum."""
    q, v = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 8, 1)
    k = torch.full((1, 1, 8, 1), -30.0)  # SiLU gives these nothing
    k[:, :, :2] = 3.0
    twice = k.clone()
    twice[:, :, :4] = 3.0
    bias = torch.zeros(1, 1)
    ratio = hstu_attention(q, twice, v, bias) / hstu_attention(q, k, v, bias)
    assert float(ratio) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pieces", [(1, 3, 8), (1,) * 12, (12,)])
def test_a_row_in_pieces_equals_the_row(timed: bool, packed: bool, pieces: tuple[int, ...]) -> None:
    made = layer()
    x = torch.randn(2, 12, 16, generator=gen(5))
    times = times_of(2, 12) if timed else None
    segments = torch.tensor([[3] * 5 + [4] * 7, [0] * 12]) if packed else None
    whole = made(x, times=times, segments=segments)
    state, outs, start = made.new_state(2, 15), [], 0
    assert state.n_bytes == 2 * 3 * 15 * (6 + 5) * 4
    for n in pieces:
        cut = slice(start, start + n)
        outs.append(
            made(
                x[:, cut],
                times=None if times is None else times[:, cut],
                segments=None if segments is None else segments[:, cut],
                state=state,
            )
        )
        start += n
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-4)
    assert state.length == 12
    assert state.n_bytes == 2 * 15 * (3 * (6 + 5) * 4 + 8 * timed + 8 * packed)


def test_a_packed_row_equals_its_documents() -> None:
    made = layer()
    docs = [torch.randn(1, n, 16, generator=gen(n)) for n in (5, 1, 6)]
    times = [times_of(1, n) + 7 * n for n in (5, 1, 6)]
    packed = made(
        torch.cat(docs, 1), times=torch.cat(times, 1), segments=torch.tensor([[1] * 5 + [2] + [3] * 6])
    )
    apart = torch.cat([made(d, times=t) for d, t in zip(docs, times, strict=True)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)


def test_the_past_alone_is_seen_and_every_parameter_learns() -> None:
    made = layer()
    x, times = torch.randn(2, 10, 16, generator=gen(5)), times_of(2, 10)
    y = made(x, times=times)
    other = x.clone()
    other[:, 6:] += 1
    torch.testing.assert_close(made(other, times=times)[:, :6], y[:, :6])
    assert not torch.allclose(made(x, times=times * 3), y)
    (y * torch.randn(y.shape, generator=gen(6))).sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_bf16_is_near_fp32() -> None:
    made, x = layer(), torch.randn(2, 40, 16, generator=gen(5))
    low, full = made(x.bfloat16()), made(x)
    assert low.dtype == torch.bfloat16
    assert float(((low.float() - full).norm() / full.norm()).detach()) < 0.03


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_heads is 3"):
        HSTUAttention(16, 3)
    with pytest.raises(ConfigError, match="max_distance"):
        HSTUAttention(16, 2, max_distance=0)
    x, times = torch.randn(1, 4, 16), times_of(1, 4)
    with pytest.raises(ConfigError, match="n_time_buckets"):
        layer(n_time_buckets=0)(x, times=times)
    made = layer()
    state = made.new_state(1, 6)
    made(x, state=state)
    with pytest.raises(ConfigError, match="times"):
        made(x[:, :1], times=times[:, :1], state=state)
    with pytest.raises(ConfigError, match="capacity is 6"):
        made(x, state=state)
