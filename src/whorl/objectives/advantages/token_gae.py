"""Advantages of tokens from a critic: GAE over concatenated completions.

Each sampled token is a step. The state is the text before it, the action is the token. The reward is usually 0 except
at the last token, plus a KL penalty at each token (`divergences.kl_reward`). N tokens of S sequences are laid out as
[T, S] for `gae`. After the last token of a completion the next value is 0, unless it was truncated and
`bootstrap_value` is given.

The subtle point: tokens that the policy did not choose (prompt, tool output, forced ids) are not steps. The caller
removes them, so the next sampled token follows directly. `value[t]` is the critic's value before token t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.advantages.estimators import Trajectory, gae
from whorl.objectives.advantages.group_advantages import StdEstimator


@torch.no_grad()
def token_gae(
    reward: Tensor,
    value: Tensor,
    sequence: Tensor,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the generalized advantages of N tokens (PPO for text: Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Args:
        reward, value: [N]. sequence: [N] int64, tokens of a sequence in order.
        bootstrap_value: [S] values after the last token; 0, or None for all, where the completion ended.

    Returns:
        (advantage [N], target [N] of the critic).

    Raises:
        ConfigError: shapes do not fit.
    """
    index, steps = _to_trajectory(reward, value, sequence, bootstrap_value)
    advantage = gae(steps, discount, lambda_)[index] if len(reward) else torch.zeros_like(reward)
    return advantage, advantage + value


@torch.no_grad()
def whiten(advantage: Tensor, std_estimator: StdEstimator = "biased", eps: float = 1e-8) -> Tensor:
    """Return [N] minus their mean, over their standard deviation, for a whole batch; 0 where all are equal."""
    if not len(advantage) or bool(advantage.min() == advantage.max()):
        return torch.zeros_like(advantage)
    centred = advantage - advantage.mean()
    if std_estimator == "none":
        return centred
    n = len(advantage) - (std_estimator == "unbiased")
    return centred / ((centred.square().sum() / n).sqrt() + eps)


def _to_trajectory(
    reward: Tensor, value: Tensor, sequence: Tensor, bootstrap_value: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Trajectory]:
    """Return (index of each token in [T, S], the steps)."""
    if not reward.shape == value.shape == sequence.shape or reward.ndim != 1:
        raise ConfigError(
            f"reward is {list(reward.shape)}, value {list(value.shape)}, sequence {list(sequence.shape)}",
            expected="[N] for all",
        )
    lengths = torch.bincount(
        sequence, minlength=1 if bootstrap_value is None else len(bootstrap_value)
    )  # [S]
    if bootstrap_value is not None and len(lengths) > len(bootstrap_value):
        raise ConfigError(
            f"bootstrap_value is {list(bootstrap_value.shape)}",
            expected=f"[{len(lengths)}], one per sequence",
        )
    order = sequence.argsort(stable=True)
    first_step = lengths.cumsum(0) - lengths
    time = torch.empty_like(sequence)
    time[order] = torch.arange(len(sequence), device=sequence.device) - first_step[sequence[order]]
    index = (time, sequence)
    shape = (int(lengths.max()), len(lengths))

    def to_grid(x: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=x.dtype, device=x.device)
        out[index] = x
        return out

    values = to_grid(value)
    next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    is_last = torch.zeros(shape, dtype=torch.bool, device=reward.device)
    nonempty = (lengths > 0).nonzero().squeeze(1)
    is_last[lengths[nonempty] - 1, nonempty] = True
    if bootstrap_value is not None:
        next_values[lengths[nonempty] - 1, nonempty] = bootstrap_value[nonempty].to(value.dtype)
    # Padding is 0 and linked to nothing; `truncated` bootstraps from `bootstrap_value`.
    return index, Trajectory(to_grid(reward), values, next_values, torch.zeros_like(is_last), is_last)
