"""Advantages without a critic: the reward of a completion relative to other completions.

Of S completions with rewards r, those with the same number in `group` belong to one prompt; n is their number.

    none            A = r
    batch           A = r - mean of the batch                               (Williams 1992: any baseline, less variance)
    group           A = r - mean of the group                               GRPO, arXiv:2402.03300, section 4.1
    leave_one_out   A = r - mean of the group's others = n / (n - 1) (r - mean)          RLOO, arXiv:2402.14740, eq. 8
    running         A = r - b, b a decayed mean of earlier batches: reinforcement comparison (Sutton 1984; Williams
                    1992, section 6). `update_running_mean` is its update.
    critic          see `token_gae.py`

    scale_rewards   none: as above (Dr. GRPO, arXiv:2503.20783)
                    biased, unbiased: A / (std + eps), with divisor n or n - 1. The GRPO paper does not define the
                    divisor; TRL and verl use n - 1.
    scale_over      baseline: std of the rewards that are compared: of the group, or of the batch
                    batch: of all rewards of the batch, as TRL's scale_rewards="batch" (arXiv:2508.08221)
                    advantages: of all advantages of the batch. With the group's mean this is
                    REINFORCE++-baseline (arXiv:2501.03262); the mean of these advantages is 0 already.

The subtle point is a group with equal rewards. Its advantages must be exactly 0, but a mean of n equal numbers may
differ in its last bit, and divided by a deviation of the same size it becomes 1. Such groups are detected by minimum
and maximum, set to 0, and counted. eps has the same effect for almost equal rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whorl.errors import ConfigError, DataError

Baseline = Literal["none", "batch", "group", "leave_one_out", "running", "critic"]
StdEstimator = Literal["none", "biased", "unbiased"]
ScaleOver = Literal["baseline", "batch", "advantages"]


@dataclass(frozen=True)
class GroupAdvantages:
    """advantage: [S]. n_groups: number of groups. n_zero_std: groups with equal rewards (including n = 1).

    zero_std: [S] bool, True for completions of such a group.
    """

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
    scale_over: ScaleOver = "baseline",
    running_mean: float | None = None,
    eps: float = 1e-4,
) -> GroupAdvantages:
    """Return the advantages of S completions for a baseline.

    Args:
        reward: [S]. group: [S] int64, any numbers from 0; groups may differ in size and order.
        running_mean: of the rewards of earlier batches, for the baseline "running"; None subtracts the batch's mean.
        eps: added to the standard deviation.

    Raises:
        ConfigError: shapes do not fit, or the baseline needs a critic.
        DataError: a reward is not finite.
    """
    if reward.ndim != 1 or reward.shape != group.shape:
        raise ConfigError(
            f"reward is {list(reward.shape)} and group {list(group.shape)}", expected="[S] for both"
        )
    if not bool(reward.isfinite().all()):
        row = int((~reward.isfinite()).nonzero()[0])
        raise DataError(
            f"reward {row} is {float(reward[row])}", expected="a finite number", do="fix the verifier"
        )
    if baseline == "critic":
        raise ConfigError(
            'baseline "critic" needs values, not only rewards', do="use advantages/token_gae.py"
        )
    groups, group_index = torch.unique(group, return_inverse=True)
    group_stats = _group_stats(reward, group_index, len(groups))
    batch_stats = _group_stats(reward, torch.zeros_like(group_index), 1)
    baseline_stats = group_stats if baseline in ("group", "leave_one_out") else batch_stats
    others = (baseline_stats.n * baseline_stats.mean - reward) / (baseline_stats.n - 1).clamp(min=1)
    baselines: dict[Baseline, Tensor | float] = {
        "none": 0.0,
        "batch": baseline_stats.mean,
        "group": baseline_stats.mean,
        "leave_one_out": others,
        "running": batch_stats.mean if running_mean is None else running_mean,
    }
    advantage = reward - baselines[baseline]
    if baseline != "none" and (baseline != "running" or running_mean is None):
        advantage = advantage.masked_fill(baseline_stats.zero_std, 0.0)
    if scale_rewards != "none":
        scale_stats = {"baseline": baseline_stats, "batch": batch_stats}.get(scale_over)
        if scale_stats is None:
            scale_stats = _group_stats(advantage, torch.zeros_like(group_index), 1)
        divisor = scale_stats.n if scale_rewards == "biased" else (scale_stats.n - 1).clamp(min=1)
        scale = (scale_stats.sum_squares / divisor).sqrt() + eps
        advantage = torch.where(scale_stats.zero_std, advantage, advantage / scale)
    even = torch.zeros(len(groups), dtype=torch.bool, device=reward.device).scatter(
        0, group_index, group_stats.zero_std
    )
    return GroupAdvantages(advantage, len(groups), int(even.sum()), group_stats.zero_std)


def update_running_mean(running_mean: float | None, reward: Tensor, decay: float) -> float:
    """Return decay running_mean + (1 - decay) mean of the rewards [S]; for None the mean of the rewards.

    The baseline of a batch excludes that batch's rewards, except for the first one, so it adds no bias.
    """
    mean = float(reward.mean())
    return mean if running_mean is None else decay * running_mean + (1 - decay) * mean


@dataclass(frozen=True)
class _GroupStats:
    """Statistics of the completions that each one is compared with; each field is [S].

    n: their number. mean: their mean. sum_squares: squared deviations, summed. zero_std: whether all are equal.
    """

    n: Tensor
    mean: Tensor
    sum_squares: Tensor
    zero_std: Tensor


def _group_stats(reward: Tensor, group_index: Tensor, groups: int) -> _GroupStats:
    zero = torch.zeros(groups, dtype=reward.dtype, device=reward.device)
    n = zero.index_add(0, group_index, torch.ones_like(reward))[group_index]
    mean = zero.index_add(0, group_index, reward)[group_index] / n
    squares = zero.index_add(0, group_index, (reward - mean).square())[group_index]
    lowest, highest = (
        zero.scatter_reduce(0, group_index, reward, reduction, include_self=False)[group_index]
        for reduction in ("amin", "amax")
    )
    return _GroupStats(n, mean, squares, lowest == highest)
