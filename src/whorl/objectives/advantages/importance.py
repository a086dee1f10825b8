"""Stale samples put right: how much a token counts whose policy is no longer the one that learns.

With r_t = pi(y_t) / mu(y_t), pi the policy that the objective means (the proximal one, or the one that learns), mu the one
that sampled (older weights, another precision), `rule` says what each token's term is multiplied with:

    truncate    min(r_t, high)                        Espeholt et al. 2018, arXiv:1802.01561 (rho); below `low`, low
    mask        r_t if low <= r_t <= high, else 0     a token that could not have come from pi teaches nothing about it
    trace       min(r_t, high) prod over s < t of min(r_s, 1)       V-trace's weights: what came before must be likely too

level "token" takes r_t as it is. "sequence" takes the product over the sequence, which is the exact correction for a reward
that comes at the end, and of hopeless variance for long answers; "mean" its geometric mean, as in GSPO (arXiv:2507.18071).

The subtle part: weights carry no gradient. They say under which distribution an expectation is meant; if they were
differentiated, the objective could be raised by moving them. And their statistics are the first to look at when a run goes
wrong: an effective sample size well below 1 says that few tokens make the whole step.
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
    """What N ratios are like: mean (1 if mu really sampled them), least, largest, effective share of the sample
    (sum r)^2 / (N sum r^2), mean absolute log-ratio, and share of tokens that the rule changed."""

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
    """Weights [N] for `Tokens.weight`, without gradient, and the statistics of the ratios before the rule.

    Args:
        log_prob: [N] of pi; behaviour_log_prob: [N] of mu; sequence: [N] int64, tokens of a sequence in their order.
        low, high: the rule's bounds, as ratios.

    Raises:
        ConfigError: shapes that do not fit, bounds the wrong way round, or a trace of whole sequences.
    """
    if not log_prob.shape == behaviour_log_prob.shape == sequence.shape or log_prob.ndim != 1:
        raise ConfigError(
            f"log_prob is {list(log_prob.shape)}, behaviour_log_prob {list(behaviour_log_prob.shape)}, "
            f"sequence {list(sequence.shape)}",
            expected="[N], all alike",
        )
    if not 0 <= low <= high:
        raise ConfigError(f"ratios are kept from {low} to {high}", expected="0 <= low <= high")
    if rule == "trace" and level != "token":
        raise ConfigError(f"a trace of the level {level!r}", expected='"token"')
    log_ratio = log_prob - behaviour_log_prob
    if level != "token" and len(log_ratio):
        lengths = torch.bincount(sequence)
        whole = torch.zeros(len(lengths), dtype=log_ratio.dtype, device=log_ratio.device)
        whole = whole.index_add(0, sequence, log_ratio)
        log_ratio = (whole if level == "sequence" else whole / lengths.clamp(min=1))[sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside = (ratio >= low) & (ratio <= high)
    weight = ratio * inside if rule == "mask" else ratio.clamp(low, high)
    if rule == "trace":
        weight = weight * _prefix_ratio(log_ratio.clamp(-MAX_LOG_RATIO, 0), sequence)
    return weight, _importance_stats(log_ratio, ratio, (weight != ratio).to(ratio.dtype))


def _prefix_ratio(log_ratio: Tensor, sequence: Tensor) -> Tensor:
    """[N] exp of the sum over the tokens before, each in its sequence."""
    order = sequence.argsort(stable=True)
    ordered = log_ratio[order].double()
    sums = ordered.cumsum(0) - ordered  # of all tokens before, those of other sequences too
    numbers = sequence[order]
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[1:] = numbers[1:] != numbers[:-1]
    begins = sums[first][first.cumsum(0) - 1]  # [N] what had gathered where the sequence begins
    out = torch.empty_like(log_ratio)
    out[order] = (sums - begins).exp().to(log_ratio.dtype)
    return out


def _importance_stats(log_ratio: Tensor, ratio: Tensor, changed: Tensor) -> ImportanceStats:
    if not len(ratio):
        return ImportanceStats(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    effective = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    figures = (ratio.mean(), ratio.min(), ratio.max(), effective, log_ratio.abs().mean(), changed.mean())
    return ImportanceStats(*(float(x) for x in figures))
