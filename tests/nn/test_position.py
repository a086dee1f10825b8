"""Learned and sinusoidal positions and ALiBi slopes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.nn.checks import gen

from whorl.nn.absolute_positions import LearnedPositions, SinusoidalPositions, alibi_slopes


def test_learned_positions_are_table_rows_with_gradients() -> None:
    table = LearnedPositions(8, 4, generator=gen())
    positions = torch.tensor([[0, 1, 2], [5, 7, 7]])
    out = table(positions)
    assert torch.equal(out, table.weight[positions])
    assert torch.equal(table.between(2, 5), table.weight[2:5])
    out.sum().backward()
    assert table(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 4)
    # Row 7 is used twice, rows 3, 4 and 6 never.
    assert table.weight.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 1, 0, 2]


def test_learned_positions_follow_the_generator() -> None:
    one, same, other = (LearnedPositions(64, 32, generator=gen(s)) for s in (1, 1, 2))
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    assert float(one.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_sinusoidal_positions_match_formula() -> None:
    positions = torch.tensor([[0, 1], [17, 4000]])
    out = SinusoidalPositions(6)(positions)
    assert out.shape == (2, 2, 6) and out.dtype == torch.float32
    for row, position in zip(out.flatten(0, 1), positions.flatten().tolist(), strict=True):
        angles = [position / 10_000 ** (2 * i / 6) for i in range(3)]
        want = [f(angle) for angle in angles for f in (math.sin, math.cos)]
        assert row.tolist() == pytest.approx(want, abs=3e-4)


@pytest.mark.parametrize("n_heads", [1, 3, 6, 8, 12, 16, 20, 25])
def test_alibi_slopes_match_bloom(n_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # The bias at distance 1 from the start is the slope.
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(n_heads), theirs)
    assert len(set(alibi_slopes(n_heads).tolist())) == n_heads
    if n_heads == 8:  # the paper's example
        assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
