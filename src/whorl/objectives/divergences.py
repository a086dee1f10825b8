"""KL divergence between a policy and a reference, estimated from samples of the policy, and its controller.

With x drawn from pi and d = log pi(x) - log ref(x), three estimators of KL(pi || ref) = E[d]
(Schulman 2020, http://joschu.net/blog/kl-approx.html):

    k1 = d                     unbiased, often negative, large variance
    k2 = d^2 / 2               biased (slightly, near ref), never negative
    k3 = exp(-d) - 1 + d       unbiased, never negative, small variance

The subtle point: a good estimate may have the wrong gradient. In a loss the samples are held fixed, and in expectation
(a test sums over all outcomes):

    E[grad k1] = 0                                  no penalty
    E[grad k2] = grad KL(pi || ref)                 the intended gradient
    E[grad k3] = grad KL(ref || pi)                 the reverse direction; both vanish at ref and agree near it

So k1 belongs in the reward (E[k1 grad log pi] = grad KL(pi || ref), as in PPO). In the loss use k2, or k3 as in GRPO.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of

KLEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0  # of a log-ratio under exp; infinity times 0 would be NaN


def kl_estimate(log_prob: Tensor, reference_log_prob: Tensor, estimator: KLEstimator) -> Tensor:
    """Return [N] estimates of KL(pi || ref) per token, in nats, with the gradients listed above.

    Args:
        log_prob, reference_log_prob: [N], of tokens sampled from pi.

    Raises:
        ConfigError: unknown estimator.
    """
    d = log_prob - reference_log_prob
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return (-d).clamp(max=MAX_LOG_RATIO).exp() - 1 + d
    raise ConfigError(
        f"unknown KL estimator {estimator!r}", expected=one_of(estimator, get_args(KLEstimator))
    )


@torch.no_grad()
def kl_reward(
    log_prob: Tensor, reference_log_prob: Tensor, coef: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """Return the KL term [N] of each token's reward, -coef KL (Ziegler et al. 2019, arXiv:1909.08593, eq. 2)."""
    return -coef * kl_estimate(log_prob, reference_log_prob, estimator)


def adapt_kl_coef(
    coef: float, kl: float, target: float, *, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """Return the next KL coefficient, which keeps the KL near a target (Ziegler et al. 2019, section 2.2).

    coef (1 + gain e), with e = (kl - target) / target clipped to +-max_error.

    Args:
        kl: mean over the batch of the KL of a whole sequence, in nats. target: its desired value, above 0.
        gain: speed; the paper uses 0.1 per step. With a horizon: sequences per step over the horizon.

    Raises:
        ConfigError: target is not above 0.
    """
    if not target > 0:
        raise ConfigError(f"the KL target is {target}", expected="above 0")
    return coef * (1 + gain * max(-max_error, min(max_error, kl / target - 1)))
