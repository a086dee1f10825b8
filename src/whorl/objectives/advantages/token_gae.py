"""Advantages of tokens from a critic: `estimators.py` over texts that lie one behind the other.

Each token that was sampled is a step: the state is the text before it, the action the token, the reward mostly 0 but at
the last (plus a KL penalty at each, `divergences.kl_reward`). N tokens of S sequences are laid out [T, S], as long as the
longest, and `gae` does the rest. Texts end: behind the last token nothing follows, so its next value is 0,
unless it was cut off at the limit and is to be bootstrapped (`beyond`).

The subtle part is what a step is. Tokens that nobody chose (a prompt, a tool's answer, an id that was forced) are no steps:
they are left out beforehand, and the next sampled token follows directly. So `value[t]` is the critic's word before token t,
wherever it stood.
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
    """Generalised advantages of N tokens (PPO on texts: Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Args:
        reward, value: [N]; sequence: [N] int64, tokens of a sequence in their order.
        beyond: [S] values behind the last token; 0, or none at all, where the text ended.

    Returns:
        (advantage [N], target [N] for the critic).

    Raises:
        ConfigError: shapes that do not fit.
    """
    place, steps = _to_trajectory(reward, value, sequence, bootstrap_value)
    advantage = gae(steps, discount, lambda_)[place] if len(reward) else torch.zeros_like(reward)
    return advantage, advantage + value


@torch.no_grad()
def whiten(advantage: Tensor, std_estimator: StdEstimator = "biased", eps: float = 1e-8) -> Tensor:
    """[N] less their mean, over their deviation: of a whole batch, before it is cut. 0 where all are equal."""
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
    """(where each token lies in [T, S], the steps)."""
    if not reward.shape == value.shape == sequence.shape or reward.ndim != 1:
        raise ConfigError(
            f"reward is {list(reward.shape)}, value {list(value.shape)}, sequence {list(sequence.shape)}",
            expected="[N], all alike",
        )
    lengths = torch.bincount(
        sequence, minlength=1 if bootstrap_value is None else len(bootstrap_value)
    )  # [S]
    if bootstrap_value is not None and len(lengths) > len(bootstrap_value):
        raise ConfigError(
            f"beyond is {list(bootstrap_value.shape)}", expected=f"[{len(lengths)}], one a sequence"
        )
    order = sequence.argsort(stable=True)
    begins = lengths.cumsum(0) - lengths
    time = torch.empty_like(sequence)
    time[order] = torch.arange(len(sequence), device=sequence.device) - begins[sequence[order]]
    place = (time, sequence)
    shape = (int(lengths.max()), len(lengths))

    def spread(x: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=x.dtype, device=x.device)
        out[place] = x
        return out

    values = spread(value)
    following = torch.cat([values[1:], torch.zeros_like(values[:1])])
    last = torch.zeros(shape, dtype=torch.bool, device=reward.device)
    some = (lengths > 0).nonzero().squeeze(1)
    last[lengths[some] - 1, some] = True
    if bootstrap_value is not None:
        following[lengths[some] - 1, some] = bootstrap_value[some].to(value.dtype)
    # What lies behind a text's end is 0 all through and linked to nothing; `truncated` bootstraps from `beyond`.
    return place, Trajectory(spread(reward), values, following, torch.zeros_like(last), last)
