"""Reward models: the Bradley-Terry loss on pairs, and calibration of the resulting probabilities.

    total = sum over pairs of  - log sigma(r_c - r_w - margin)  +  center_rewards_coef (r_c + r_w)^2

with r_c and r_w the rewards of the chosen and the rejected completion.

Loss: Bradley & Terry 1952, doi:10.2307/2334029; Stiennon et al. 2020, arXiv:2009.01325, section 3.3. Margin: Touvron et
al. 2023, arXiv:2307.09288, eq. 2, larger for clearer preferences. Centering: Eisenstein et al. 2023, arXiv:2312.09244;
pairs determine differences only, so the level would drift.

`calibration` compares predicted probabilities with observed frequencies. The expected calibration error (Naeini et al.
2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599, eq. 3) is the mean distance over bins, weighted by
the number of pairs in each bin.

The subtle point: with the chosen completion always first, every outcome is "yes" and nothing can be measured. So
`pair_calibration` orders a pair by the model's own preference. The probability is then 1/2 to 1, the outcome is whether
the model was right, and a tie counts half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center_rewards_coef: float = 0.0
) -> Loss:
    """Return the pairwise loss, summed over pairs.

    Args:
        chosen, rejected: [P] rewards, with gradients.
        margin: [P], 0 or more.

    Returns:
        Loss: count = P. Metrics are sums over pairs: rewards/chosen, rewards/rejected, rewards/margin (their
        difference), rewards/accuracy, ties.

    Raises:
        ConfigError: shapes do not fit.
    """
    for name, given in (("rejected", rejected), ("margin", margin)):
        if given is not None and (given.shape != chosen.shape or chosen.ndim != 1):
            raise ConfigError(
                f"{name} is {list(given.shape)} but chosen is {list(chosen.shape)}", expected="[P]"
            )
    difference = chosen - rejected
    each = -F.logsigmoid(difference if margin is None else difference - margin)
    if center_rewards_coef:
        each = each + center_rewards_coef * (chosen + rejected).square()
    total = each.sum()
    metrics = {
        "rewards/chosen": chosen.detach().sum(),
        "rewards/rejected": rejected.detach().sum(),
        "rewards/margin": difference.detach().sum(),
        "rewards/accuracy": (difference.detach() > 0).sum(),
        "ties": (difference.detach() == 0).sum(),
    }
    return Loss(total, torch.full_like(total.detach(), float(len(chosen))), metrics)


@dataclass(frozen=True)
class Calibration:
    """Reliability curve by bin.

    edges: [bins + 1]. predicted, observed, count: [bins], mean probability, share of outcomes and number of items; 0
    where count is 0. expected_error: the expected calibration error. max_error: the largest distance of a bin with
    items.
    """

    edges: Tensor
    predicted: Tensor
    observed: Tensor
    count: Tensor
    expected_error: float
    max_error: float


@torch.no_grad()
def calibration(
    probability: Tensor, outcome: Tensor, *, bins: int = 10, min_probability: float = 0.0
) -> Calibration:
    """Return the calibration of N probabilities, in bins of equal width from `min_probability` to 1.

    Args:
        probability: [N] from `min_probability` to 1.
        outcome: [N] from 0 to 1.

    Raises:
        ConfigError: shapes do not fit, there are no bins, or a probability is outside the bins.
    """
    if probability.ndim != 1 or probability.shape != outcome.shape:
        raise ConfigError(
            f"probability is {list(probability.shape)} and outcome {list(outcome.shape)}",
            expected="[N], both",
        )
    if bins < 1 or not 0 <= min_probability < 1:
        raise ConfigError(
            f"{bins} bins from {min_probability} to 1", expected="at least one, from 0 to below 1"
        )
    p, y = probability.double(), outcome.double()
    if not bool(((p >= min_probability) & (p <= 1)).all()):
        raise ConfigError("a probability is outside the bins", expected=f"{min_probability} to 1")
    edges = torch.linspace(min_probability, 1, bins + 1, dtype=torch.float64, device=p.device)
    which = (torch.bucketize(p, edges, right=True) - 1).clamp(0, bins - 1)  # the last bin includes both edges
    zero = torch.zeros(bins, dtype=torch.float64, device=p.device)
    count = zero.index_add(0, which, torch.ones_like(p))
    predicted, observed = (zero.index_add(0, which, x) / count.clamp(min=1) for x in (p, y))
    distance = (predicted - observed).abs()
    error = float((distance * count).sum() / max(1, len(p)))
    return Calibration(edges, predicted, observed, count, error, float(distance.max()))


@torch.no_grad()
def pair_calibration(margin: Tensor, *, bins: int = 10) -> Calibration:
    """Return the calibration of a reward model on pairs. margin: [P], r_chosen - r_rejected."""
    right = torch.where(margin == 0, 0.5, (margin > 0).double())
    return calibration(torch.sigmoid(margin.double().abs()), right, bins=bins, min_probability=0.5)
