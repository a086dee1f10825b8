"""Reward models: a number for an answer, learnt from which of two was chosen; and whether its certainty can be believed.

    total = sum over pairs of  - log sigma(r_chosen - r_rejected - margin)  +  centring (r_chosen + r_rejected)^2

(Bradley & Terry 1952, doi:10.2307/2334029, as a loss in Stiennon et al. 2020, arXiv:2009.01325, section 3.3; margin: Touvron
et al. 2023, arXiv:2307.09288, eq. 2, larger where people were surer; centring: Eisenstein et al. 2023, arXiv:2312.09244,
since only differences are learnt and the level would drift.)

`calibration` asks: of the pairs where the model said 80 %, were 80 % right? The expected calibration error (Naeini et al.
2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599, eq. 3) is the mean distance over bins, weighed by how
many pairs fall in each. The subtle part is that a pair has no natural order: told with the chosen one first, every outcome
is "yes" and nothing can be measured. So `pair_calibration` takes the side that the model prefers: its certainty lies in 1/2
to 1, the outcome is whether it was right, and a tie counts half.
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
    """The pairwise loss, summed over pairs.

    Args:
        chosen, rejected: [P] rewards, with gradients; margin: [P], 0 or more.

    Returns:
        Loss: count = P; metrics chosen_reward, rejected_reward, margin (their difference), accuracy, ties: sums over pairs.

    Raises:
        ConfigError: shapes that do not fit.
    """
    for name, given in (("rejected", rejected), ("margin", margin)):
        if given is not None and (given.shape != chosen.shape or chosen.ndim != 1):
            raise ConfigError(
                f"{name} is {list(given.shape)} beside chosen {list(chosen.shape)}", expected="[P]"
            )
    ahead = chosen - rejected
    each = -F.logsigmoid(ahead if margin is None else ahead - margin)
    if center_rewards_coef:
        each = each + center_rewards_coef * (chosen + rejected).square()
    total = each.sum()
    metrics = {
        "rewards/chosen": chosen.detach().sum(),
        "rewards/rejected": rejected.detach().sum(),
        "rewards/margin": ahead.detach().sum(),
        "rewards/accuracy": (ahead.detach() > 0).sum(),
        "ties": (ahead.detach() == 0).sum(),
    }
    return Loss(total, torch.full_like(total.detach(), float(len(chosen))), metrics)


@dataclass(frozen=True)
class Calibration:
    """By bin, each [bins]: edges [bins + 1], said (mean probability), seen (share of outcomes), count; 0 where count is.

    error: the expected calibration error; most: the largest distance of a bin that has any.
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
    """How far N probabilities are from what happened, in bins of equal width from `lowest` to 1.

    Args:
        probability: [N] from `lowest` to 1; outcome: [N] 0 or 1, or between.

    Raises:
        ConfigError: shapes that do not fit, no bins, or probabilities outside the bins.
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
        raise ConfigError("a probability lies outside the bins", expected=f"{min_probability} to 1")
    edges = torch.linspace(min_probability, 1, bins + 1, dtype=torch.float64, device=p.device)
    which = (torch.bucketize(p, edges, right=True) - 1).clamp(0, bins - 1)  # the last bin has both its edges
    zero = torch.zeros(bins, dtype=torch.float64, device=p.device)
    count = zero.index_add(0, which, torch.ones_like(p))
    said, seen = (zero.index_add(0, which, x) / count.clamp(min=1) for x in (p, y))
    apart = (said - seen).abs()
    error = float((apart * count).sum() / max(1, len(p)))
    return Calibration(edges, said, seen, count, error, float(apart.max()))


@torch.no_grad()
def pair_calibration(margin: Tensor, *, bins: int = 10) -> Calibration:
    """Of a reward model's pairs. margin: [P], r_chosen - r_rejected."""
    right = torch.where(margin == 0, 0.5, (margin > 0).double())
    return calibration(torch.sigmoid(margin.double().abs()), right, bins=bins, min_probability=0.5)
