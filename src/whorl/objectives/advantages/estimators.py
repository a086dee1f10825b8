"""Return and advantage estimators over trajectories.

All are pure functions of time-major tensors [T, B] (T steps of B environments), without gradients. Conventions:

    reward[t], value[t] = V(s_t), next_value[t] = V(s') for the state that the step led to
    terminated[t]: the episode ended, so V(s') counts as 0
    truncated[t]:  a time limit cut the episode off, so V(s') counts, and no later step belongs to the episode

The subtle point is truncation. A truncated environment is reset and returns the first observation of the next episode.
Its value is not V(s'). So `next_value` comes from the final observation of the transition. A truncated step is
bootstrapped like any other, but is never linked to its successor.

The estimators are one family, and tests check the identities. GAE with lambda = 1 is Monte Carlo minus the baseline;
with lambda = 0 it is the one-step error. TD(lambda) is GAE plus the baseline. V-trace with all ratios 1 is the n-step
return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """T steps of B environments; each field is [T, B].

    reward, value, next_value: fp32. terminated, truncated: bool. See the top of this file.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor

    @property
    def episode_end(self) -> Tensor:
        """Return [T, B], True where the next step belongs to another episode."""
        return self.terminated | self.truncated

    @property
    def same_episode(self) -> Tensor:
        """Return [T, B], 1 where the next step belongs to the same episode, else 0."""
        return (~self.episode_end).to(self.reward.dtype)

    def td_error(self, discount: float) -> Tensor:
        """Return [T, B] one-step TD errors, r + discount V(s') - V(s) (Sutton & Barto 2018, eq. 6.5)."""
        return self.reward + discount * self.next_value * ~self.terminated - self.value


def _reverse_scan(first: Tensor, decay: Tensor) -> Tensor:
    """Return x[t] = first[t] + decay[t] x[t + 1] with x[T] = 0.  first, decay: [T, B] -> [T, B]."""
    out = torch.empty_like(first)
    following = torch.zeros_like(first[0])
    for t in range(first.shape[0] - 1, -1, -1):
        following = torch.addcmul(first[t], decay[t], following, out=out[t])
    return out


@torch.no_grad()
def discounted_returns(steps: Trajectory, discount: float) -> Tensor:
    """Return [T, B] discounted rewards to the end of the episode, with V(s') after a cut or the last step."""
    bootstrap = steps.truncated.clone()
    bootstrap[-1] = True
    first = steps.reward + discount * steps.next_value * (bootstrap & ~steps.terminated)
    return _reverse_scan(first, discount * steps.same_episode)


@torch.no_grad()
def n_step_returns(steps: Trajectory, discount: float, n: int) -> Tensor:
    """Return [T, B] n-step returns (Sutton & Barto 2018, eq. 7.1).

    They have fewer rewards where the episode or the data end.

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}, expected at least 1")
    length = steps.reward.shape[0]
    one_step = steps.reward + discount * steps.next_value * ~steps.terminated  # [T, B] the return with n = 1
    out = one_step.clone()
    continues = ~steps.episode_end
    for _ in range(n - 1):
        # A return with k + 1 rewards is one reward plus the next state's return with k rewards.
        longer = one_step.clone()
        longer[: length - 1] = torch.where(
            continues[:-1], steps.reward[:-1] + discount * out[1:], one_step[:-1]
        )
        out = longer
    return out


@torch.no_grad()
def gae(steps: Trajectory, discount: float, lambda_: float) -> Tensor:
    """Return [T, B] generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16)."""
    return _reverse_scan(steps.td_error(discount), discount * lambda_ * steps.same_episode)


@torch.no_grad()
def td_lambda_returns(steps: Trajectory, discount: float, lambda_: float) -> Tensor:
    """Return [T, B] lambda-returns (Sutton & Barto 2018, eq. 12.18), targets of a value function."""
    return gae(steps, discount, lambda_) + steps.value


@dataclass(frozen=True)
class VTrace:
    """target: [T, B] regression target of V(s_t). advantage: [T, B] weight of the policy gradient."""

    target: Tensor
    advantage: Tensor


@torch.no_grad()
def v_trace(
    steps: Trajectory,
    log_ratio: Tensor,
    discount: float,
    *,
    lambda_: float = 1.0,
    rho: float = 1.0,
    c: float = 1.0,
) -> VTrace:
    """Return off-policy corrected targets and advantages (Espeholt et al. 2018, IMPALA, arXiv:1802.01561, eq. 1).

    Args:
        log_ratio: [T, B] log of pi(a|s) / mu(a|s), policy in training over policy that acted.
        rho, c: upper bounds of the ratios. rho bounds the fixed point, c how far an error propagates back.
    """
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=rho)
    trace = lambda_ * ratio.clamp(max=c)
    correction = _reverse_scan(weight * steps.td_error(discount), discount * trace * steps.same_episode)
    target = steps.value + correction
    following = steps.next_value.clone()
    following[:-1] = torch.where(steps.episode_end[:-1], steps.next_value[:-1], target[1:])
    advantage = weight * (steps.reward + discount * following * ~steps.terminated - steps.value)
    return VTrace(target, advantage)
