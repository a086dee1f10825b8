"""The pairwise reward loss against its equation, and calibration against hand-counted bins."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.nn.checks import assert_same_losses

from whorl.errors import ConfigError
from whorl.objectives.reward import bradley_terry, calibration, pair_calibration


@pytest.mark.parametrize("margin", [None, torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)])
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_bradley_terry_matches_equation(margin: torch.Tensor | None, centering: float) -> None:
    g = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randn(2, 4, generator=g, dtype=torch.float64).requires_grad_()
    loss = bradley_terry(chosen, rejected, margin=margin, center_rewards_coef=centering)
    ahead = chosen - rejected - (0 if margin is None else margin)
    wanted = (torch.log(1 + torch.exp(-ahead)) + centering * (chosen + rejected) ** 2).sum()
    assert_same_losses(loss.total, wanted, (chosen, rejected))
    assert loss.count == 4
    assert loss.metrics["rewards/accuracy"] == (chosen > rejected).sum()


def test_calibration_matches_hand_count() -> None:
    p = torch.tensor([0.0, 0.1, 0.3, 0.3, 0.75, 1.0])
    y = torch.tensor([0, 1, 0, 1, 1, 1])
    found = calibration(p, y, bins=4)
    assert found.count.tolist() == [2, 2, 0, 2]
    assert found.predicted.tolist() == pytest.approx([0.05, 0.3, 0, 0.875])
    assert found.observed.tolist() == [0.5, 0.5, 0, 1]
    assert found.expected_error == pytest.approx((2 * 0.45 + 2 * 0.2 + 2 * 0.125) / 6)
    assert found.max_error == pytest.approx(0.45) and found.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_pair_calibration_uses_preferred_side() -> None:
    found = pair_calibration(torch.tensor([2.0, -2.0, 0.0]), bins=5)
    assert found.count.sum() == 3 and float(found.edges[0]) == 0.5
    sure = 1 / (1 + math.exp(-2))
    assert float(found.predicted[3]) == pytest.approx(sure) and float(found.observed[3]) == 0.5
    assert float(found.observed[0]) == 0.5  # a tie counts half


def test_reward_of_empty_batch_is_zero() -> None:
    empty = torch.zeros(0)
    assert pair_calibration(empty).expected_error == 0
    loss = bradley_terry(empty, empty)
    assert loss.total == 0 and loss.count == 0


def test_reward_rejects_invalid_arguments() -> None:
    with pytest.raises(ConfigError):
        bradley_terry(torch.zeros(2), torch.zeros(3))
    for p, bins in (([0.5, 1.5], 10), ([0.5], 0)):
        with pytest.raises(ConfigError):
            calibration(torch.tensor(p), torch.zeros(len(p)), bins=bins)
