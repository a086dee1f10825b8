"""Returns and advantages: what a stretch of experience says about how good its states and actions were.

All are pure functions of time-major tensors [T, B] (T steps of B environments side by side), and none carries a gradient.
What they share, in one convention:

    reward[t], value[t] = V(s_t), next_value[t] = V(s') for the state that the step really led to
    terminated[t]: the episode ended there, nothing follows, so V(s') counts as 0
    truncated[t]:  it was cut off there (a time limit), so V(s') counts, and nothing after it belongs to the episode

The subtle part is the last line. An environment that was cut off is reset, and the observation that comes back is the new
episode's first; the value of *that* one is not what the cut step led to. So `next_value` comes from the final observation,
which transitions carry, and a truncated step is bootstrapped like any other but never linked to its successor.

They are one family (tests hold the identities): GAE with lambda = 1 is Monte Carlo minus the baseline, with lambda = 0 the
one-step error; TD(lambda) is GAE plus the baseline; V-trace with all ratios 1 is the n-step return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """T steps of B environments; each field is [T, B].

    reward, value, next_value: fp32; terminated, truncated: bool. See the top of this file.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor

    @property
    def episode_end(self) -> Tensor:
        """[T, B] True where the next step belongs to another episode."""
        return self.terminated | self.truncated

    @property
    def same_episode(self) -> Tensor:
        """[T, B] 1 where the next step belongs to the same episode, else 0."""
        return (~self.episode_end).to(self.reward.dtype)

    def td_error(self, discount: float) -> Tensor:
        """[T, B] the one-step temporal-difference error r + discount V(s') - V(s) (Sutton & Barto 2018, eq. 6.5)."""
        return self.reward + discount * self.next_value * ~self.terminated - self.value


def _reverse_scan(first: Tensor, decay: Tensor) -> Tensor:
    """x[t] = first[t] + decay[t] x[t + 1], from the end, where x[T] = 0.  first, decay: [T, B] -> [T, B]."""
    out = torch.empty_like(first)
    following = torch.zeros_like(first[0])
    for t in range(first.shape[0] - 1, -1, -1):
        following = torch.addcmul(first[t], decay[t], following, out=out[t])
    return out


@torch.no_grad()
def discounted_returns(steps: Trajectory, discount: float) -> Tensor:
    """[T, B] discounted rewards to the end of the episode; V(s') stands for what lies beyond a cut or the last step."""
    beyond = steps.truncated.clone()
    beyond[-1] = True
    first = steps.reward + discount * steps.next_value * (beyond & ~steps.terminated)
    return _reverse_scan(first, discount * steps.same_episode)


@torch.no_grad()
def n_step_returns(steps: Trajectory, discount: float, n: int) -> Tensor:
    """[T, B] n rewards and the value behind them (Sutton & Barto 2018, eq. 7.1); fewer where the episode or the data end.

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}, expected at least 1")
    length = steps.reward.shape[0]
    one = steps.reward + discount * steps.next_value * ~steps.terminated  # [T, B] the return with n = 1
    out = one.clone()
    going = ~steps.episode_end
    for _ in range(n - 1):
        # A return with k + 1 rewards is one reward and the next state's return with k.
        longer = one.clone()
        longer[: length - 1] = torch.where(going[:-1], steps.reward[:-1] + discount * out[1:], one[:-1])
        out = longer
    return out


@torch.no_grad()
def gae(steps: Trajectory, discount: float, lambda_: float) -> Tensor:
    """[T, B] generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16)."""
    return _reverse_scan(steps.td_error(discount), discount * lambda_ * steps.same_episode)


@torch.no_grad()
def td_lambda_returns(steps: Trajectory, discount: float, lambda_: float) -> Tensor:
    """[T, B] lambda-returns (Sutton & Barto 2018, eq. 12.18): targets for a value function."""
    return gae(steps, discount, lambda_) + steps.value


@dataclass(frozen=True)
class VTrace:
    """target: [T, B] what V(s_t) is to learn; advantage: [T, B] what the policy gradient is weighted with."""

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
    """Off-policy corrected targets (Espeholt et al. 2018, IMPALA, arXiv:1802.01561, eq. 1).

    Args:
        log_ratio: [T, B] log of pi(a|s), the policy that learns, over mu(a|s), the one that acted.
        rho, c: where the ratios are cut: rho bounds what is learnt towards, c how far back an error reaches.
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
