"""InfoNCE against its definition, pair by pair, and with groups."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import assert_same_gradients
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.contrastive import info_nce


def pairs(n: int = 6, d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    x, y = (F.normalize(torch.randn(n, d, generator=g), dim=-1).requires_grad_() for _ in range(2))
    return x, y, torch.tensor(4.0, requires_grad=True)


def by_hand(x: Tensor, y: Tensor, scale: Tensor, groups: list[int]) -> Tensor:
    """Return the sum of -log of each pair's share among its negatives."""
    total, n = torch.zeros(()), len(x)
    rivals = torch.tensor([[j == i or groups[j] != groups[i] for j in range(n)] for i in range(n)])
    for a, b in ((x, y), (y, x)):
        weights = (scale * a @ b.t()).exp() * rivals
        total = total - 0.5 * (weights.diagonal() / weights.sum(1)).log().sum()
    return total


@pytest.mark.parametrize("groups", [None, [0, 1, 0, 2, 1, 0], [3] * 6])
def test_info_nce_matches_definition(groups: list[int] | None) -> None:
    inputs = pairs()
    loss = info_nce(*inputs, None if groups is None else torch.tensor(groups))
    want = by_hand(*inputs, groups or list(range(6)))
    torch.testing.assert_close(loss.total, want)
    assert_same_gradients(loss.total, want, inputs, atol=1e-6, rtol=1e-5)
    assert loss.count == 6


def test_info_nce_correct_counts_both_directions() -> None:
    x = torch.eye(4)
    assert info_nce(x, x, 1.0).metrics["correct"] == 4
    # Rows 0 and 1 exchanged: both directions miss them,
    assert info_nce(x, x[[1, 0, 2, 3]], 1.0).metrics["correct"] == 2
    # unless they are in one group.
    assert info_nce(x, x[[1, 0, 2, 3]], 1.0, torch.tensor([5, 5, 6, 7])).metrics["correct"] == 4


def test_info_nce_of_bf16_and_of_empty_batch() -> None:
    x, y, scale = (t.detach() for t in pairs(40, 16))
    exact = float(info_nce(x, y, scale).total)
    assert float(info_nce(x.bfloat16(), y.bfloat16(), scale).total) == pytest.approx(exact, rel=1e-2)
    assert info_nce(x.bfloat16(), y.bfloat16(), scale).total.dtype == torch.float32
    empty = info_nce(torch.zeros(0, 4), torch.zeros(0, 4), 1.0)
    assert empty.total == 0 and empty.count == 0


def test_info_nce_rejects_invalid_shapes() -> None:
    with pytest.raises(ConfigError, match=r"x is \[3, 4\] and y \[2, 4\]"):
        info_nce(torch.zeros(3, 4), torch.zeros(2, 4), 1.0)
    with pytest.raises(ConfigError, match="groups"):
        info_nce(torch.zeros(3, 4), torch.zeros(3, 4), 1.0, torch.zeros(2))
