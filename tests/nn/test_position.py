"""Learned and sinusoidal positions and ALiBi slopes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from whorl.nn.positions.absolute import LearnedPositions, SinusoidalPositions, alibi_slopes


def test_learned_positions_are_table_rows_with_gradients() -> None:
    table = LearnedPositions(8, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2], [5, 7, 7]])
    out = table(positions)
    assert out.shape == (2, 3, 4)
    for b in range(2):
        for t in range(3):
            assert torch.equal(out[b, t], table.weight[positions[b, t]])
    assert torch.equal(table.between(2, 5), table(torch.arange(2, 5)))
    out.sum().backward()
    assert table(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 4)
    assert table.weight.grad is not None
    # Row 7 is used twice, rows 3, 4 and 6 never.
    assert table.weight.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 1, 0, 2]


def test_learned_positions_follow_the_generator() -> None:
    one, same, other = (
        LearnedPositions(64, 32, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    assert float(one.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_sinusoidal_positions_match_formula() -> None:
    out = SinusoidalPositions(6)(torch.tensor([[0, 1], [17, 4000]]))
    assert out.shape == (2, 2, 6) and out.dtype == torch.float32
    for index, position in (((0, 0), 0), ((0, 1), 1), ((1, 0), 17), ((1, 1), 4000)):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert float(out[index][2 * i]) == pytest.approx(math.sin(angle), abs=3e-4)
            assert float(out[index][2 * i + 1]) == pytest.approx(math.cos(angle), abs=3e-4)


def test_sinusoidal_products_depend_on_distance_only() -> None:
    table = SinusoidalPositions(32)(torch.arange(300))
    products = table @ table.T
    for distance in (1, 7, 50):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-3, rtol=0)


def test_alibi_slopes_of_powers_of_two_are_geometric() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]  # the paper's example
    torch.testing.assert_close(alibi_slopes(16), 2.0 ** (-0.5 * torch.arange(1, 17)))
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("n_heads", [3, 6, 12, 20, 25])
def test_alibi_slopes_of_other_counts_match_bloom(n_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # The bias at distance 1 from the start is the slope.
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(n_heads), theirs)
    assert len(set(alibi_slopes(n_heads).tolist())) == n_heads
