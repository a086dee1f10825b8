"""Importance weights of stale samples.

With r_t = pi(y_t) / mu(y_t), pi is the policy of the objective (proximal, or in training). mu is the policy that
sampled (older weights, or another precision). `rule` maps ratios to the weight of each token:

    truncate    min(r_t, high)                        Espeholt et al. 2018, arXiv:1802.01561 (rho); at least `low`
    mask        r_t if low <= r_t <= high, else 0     drops tokens that are improbable under pi
    trace       min(r_t, high) prod over s < t of min(r_s, 1)       weights of V-trace, with the prefix's likelihood

level "token" uses r_t. "sequence" uses the product over the sequence: the exact correction for a reward at the end,
with a variance that is too large for long completions. "mean" uses its geometric mean, as in GSPO (arXiv:2507.18071).

The subtle point: weights carry no gradient. They define the distribution of an expectation; differentiating them would
optimize the distribution instead. An effective sample size far below 1 means that few tokens determine the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.divergences import MAX_LOG_RATIO

ImportanceRule = Literal["truncate", "mask", "trace"]
ImportanceLevel = Literal["token", "sequence", "mean"]


@dataclass(frozen=True)
class ImportanceStats:
    """Statistics of N ratios before the rule.

    ratio_mean: 1 in expectation if mu sampled the tokens. effective_sample_size: (sum r)^2 / (N sum r^2).
    log_ratio_abs: mean absolute log-ratio. clip_fraction: share of tokens that the rule changed.
    """

    ratio_mean: float
    ratio_min: float
    ratio_max: float
    effective_sample_size: float
    log_ratio_abs: float
    clip_fraction: float


@torch.no_grad()
def importance_weights(
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    sequence: Tensor,
    *,
    rule: ImportanceRule = "truncate",
    level: ImportanceLevel = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, ImportanceStats]:
    """Return weights [N] for `CompletionTokens.weight`, without gradient, and statistics of the ratios before the rule.

    Args:
        log_prob: [N] of pi. behaviour_log_prob: [N] of mu. sequence: [N] int64, tokens of a sequence in order.
        low, high: bounds of the rule, as ratios.

    Raises:
        ConfigError: shapes do not fit, low > high, or rule "trace" with a level other than "token".
    """
    if not log_prob.shape == behaviour_log_prob.shape == sequence.shape or log_prob.ndim != 1:
        raise ConfigError(
            f"log_prob is {list(log_prob.shape)}, behaviour_log_prob {list(behaviour_log_prob.shape)}, "
            f"sequence {list(sequence.shape)}",
            expected="[N] for all",
        )
    if not 0 <= low <= high:
        raise ConfigError(f"the bounds are {low} and {high}", expected="0 <= low <= high")
    if rule == "trace" and level != "token":
        raise ConfigError(f"rule is trace and level is {level!r}", expected='"token"')
    log_ratio = log_prob - behaviour_log_prob
    if level != "token" and len(log_ratio):
        lengths = torch.bincount(sequence)
        totals = torch.zeros(len(lengths), dtype=log_ratio.dtype, device=log_ratio.device)
        totals = totals.index_add(0, sequence, log_ratio)
        log_ratio = (totals if level == "sequence" else totals / lengths.clamp(min=1))[sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside = (ratio >= low) & (ratio <= high)
    weight = ratio * inside if rule == "mask" else ratio.clamp(low, high)
    if rule == "trace":
        weight = weight * _prefix_ratio(log_ratio.clamp(-MAX_LOG_RATIO, 0), sequence)
    return weight, _importance_stats(log_ratio, ratio, (weight != ratio).to(ratio.dtype))


def _prefix_ratio(log_ratio: Tensor, sequence: Tensor) -> Tensor:
    """Return [N] exp of the sum over earlier tokens of the same sequence."""
    order = sequence.argsort(stable=True)
    ordered = log_ratio[order].double()
    sums = ordered.cumsum(0) - ordered  # over all earlier tokens, of other sequences too
    numbers = sequence[order]
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[1:] = numbers[1:] != numbers[:-1]
    begins = sums[first][first.cumsum(0) - 1]  # [N] the cumulative sum at the start of the sequence
    out = torch.empty_like(log_ratio)
    out[order] = (sums - begins).exp().to(log_ratio.dtype)
    return out


def _importance_stats(log_ratio: Tensor, ratio: Tensor, changed: Tensor) -> ImportanceStats:
    if not len(ratio):
        return ImportanceStats(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    effective = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    values = (ratio.mean(), ratio.min(), ratio.max(), effective, log_ratio.abs().mean(), changed.mean())
    return ImportanceStats(*(float(x) for x in values))
