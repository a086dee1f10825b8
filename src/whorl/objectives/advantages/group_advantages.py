"""Advantages without a critic: an answer is as good as it is better than others, to the same question or to all.

Of S answers with rewards r, those with the same number in `group` answer one prompt; n is how many do.

    none            A = r
    batch           A = r - mean of all                                     (Williams 1992: any baseline, less variance)
    group           A = r - mean of the group                               GRPO, arXiv:2402.03300, section 4.1
    leave_one_out   A = r - mean of the group's others = n / (n - 1) (r - mean)          RLOO, arXiv:2402.14740, eq. 8
    critic          not here: `text_estimators.py`

    deviation       none: as above (Dr. GRPO, arXiv:2503.20783); biased, unbiased: A / (deviation + eps), of the group, or of
                    all where the baseline is; dividing by n or by n - 1. GRPO's paper does not say which; TRL's and verl's
                    code is unbiased.

The subtle part is a group whose rewards are all equal. It says nothing about any answer, so its advantages are 0, exactly:
a mean of n equal numbers may be off by its last bit, and divided by a deviation of the same bit becomes 1. Such groups are
found by their extremes, and counted: of what share a batch teaches nothing is the first figure of a curriculum. eps does the
same for rewards that differ by next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whorl.errors import ConfigError, DataError

Baseline = Literal["none", "batch", "group", "leave_one_out", "critic"]
StdEstimator = Literal["none", "biased", "unbiased"]


@dataclass(frozen=True)
class GroupAdvantages:
    """advantage: [S]; groups: how many there are; even: how many of them have rewards that are all equal (n = 1 included);
    all_equal: [S] True for answers of such a group."""

    advantage: Tensor
    n_groups: int
    n_zero_std: int
    zero_std: Tensor


@torch.no_grad()
def group_advantages(
    reward: Tensor,
    group: Tensor,
    *,
    baseline: Baseline = "group",
    scale_rewards: StdEstimator = "none",
    eps: float = 1e-4,
) -> GroupAdvantages:
    """Advantages of S answers by the baseline named.

    Args:
        reward: [S]; group: [S] int64, any numbers from 0; groups may differ in size and lie anyhow.
        eps: added to the deviation.

    Raises:
        ConfigError: shapes that do not fit, or a baseline that cannot be had here.
        DataError: a reward that is not finite.
    """
    if reward.ndim != 1 or reward.shape != group.shape:
        raise ConfigError(
            f"reward is {list(reward.shape)} and group {list(group.shape)}", expected="[S], both alike"
        )
    if not bool(reward.isfinite().all()):
        row = int((~reward.isfinite()).nonzero()[0])
        raise DataError(
            f"reward {row} is {float(reward[row])}", expected="a finite number", do="mend the verifier"
        )
    if baseline == "critic":
        raise ConfigError("a critic's baseline is not one of rewards alone", do="see text_estimators.py")
    names, where = torch.unique(group, return_inverse=True)
    own = _group_stats(reward, where, len(names))
    told = own if baseline in ("group", "leave_one_out") else _group_stats(reward, torch.zeros_like(where), 1)
    others = (told.n * told.mean - reward) / (told.n - 1).clamp(min=1)
    subtracted: dict[Baseline, Tensor | float] = {
        "none": 0.0,
        "batch": told.mean,
        "group": told.mean,
        "leave_one_out": others,
    }
    found = reward - subtracted[baseline]
    if scale_rewards != "none":
        divisor = told.n if scale_rewards == "biased" else (told.n - 1).clamp(min=1)
        scale = (told.sum_squares / divisor).sqrt() + eps
        found = torch.where(told.zero_std, found, found / scale)  # no deviation, no division
    if baseline != "none":
        found = found.masked_fill(told.zero_std, 0.0)
    even = torch.zeros(len(names), dtype=torch.bool, device=reward.device).scatter(0, where, own.zero_std)
    return GroupAdvantages(found, len(names), int(even.sum()), own.zero_std)


@dataclass(frozen=True)
class _GroupStats:
    """Of those that each answer is compared with: how many, their mean, the sum of squares around it, whether all are
    equal; each [S]."""

    n: Tensor
    mean: Tensor
    sum_squares: Tensor
    zero_std: Tensor


def _group_stats(reward: Tensor, where: Tensor, groups: int) -> _GroupStats:
    zero = torch.zeros(groups, dtype=reward.dtype, device=reward.device)
    n = zero.index_add(0, where, torch.ones_like(reward))[where]
    mean = zero.index_add(0, where, reward)[where] / n
    squares = zero.index_add(0, where, (reward - mean).square())[where]
    lowest, highest = (
        zero.scatter_reduce(0, where, reward, way, include_self=False)[where] for way in ("amin", "amax")
    )
    return _GroupStats(n, mean, squares, lowest == highest)
