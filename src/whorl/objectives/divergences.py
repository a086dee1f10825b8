"""How far a policy is from another, told from its own samples; and how to hold it at a distance.

With x drawn from pi and d = log pi(x) - log ref(x), three numbers estimate KL(pi || ref) = E[d]
(Schulman 2020, http://joschu.net/blog/kl-approx.html):

    k1 = d                     unbiased, often negative, large variance
    k2 = d^2 / 2               biased (a little, near ref), never negative
    k3 = exp(-d) - 1 + d       unbiased, never negative, small variance

The subtle part is that a good number need not have a good gradient. As a term of a loss each is differentiated at samples
that are held fixed, and in expectation (a test adds them up over all outcomes):

    E[grad k1] = 0                                  it holds nothing back
    E[grad k2] = grad KL(pi || ref)                 the one that is meant
    E[grad k3] = grad KL(ref || pi)                 the other way round; both vanish at ref, and agree near it

So k1 belongs in the reward (E[k1 grad log pi] = grad KL(pi || ref), as in PPO), and in the loss k2, or k3 as GRPO has it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of

KLEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = (
    20.0  # of a log-ratio under exp: e^20 is beyond all meaning, and infinity times 0 would be NaN
)


def kl_estimate(log_prob: Tensor, reference_log_prob: Tensor, estimator: KLEstimator) -> Tensor:
    """[N] estimates of KL(pi || ref), token by token, in nats, with the gradient told above.

    Args:
        log_prob, reference_log_prob: [N], of tokens that pi sampled.

    Raises:
        ConfigError: no such estimator.
    """
    d = log_prob - reference_log_prob
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return (-d).clamp(max=MAX_LOG_RATIO).exp() - 1 + d
    raise ConfigError(
        f"no KL estimator is called {estimator!r}", expected=one_of(estimator, get_args(KLEstimator))
    )


@torch.no_grad()
def kl_reward(
    log_prob: Tensor, reference_log_prob: Tensor, coef: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """[N] what is added to each token's reward: -weight KL (Ziegler et al. 2019, arXiv:1909.08593, eq. 2). No gradient."""
    return -coef * kl_estimate(log_prob, reference_log_prob, estimator)


def adapt_kl_coef(
    coef: float, kl: float, target: float, *, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """The next weight of the penalty, so that the KL stays near a target (Ziegler et al. 2019, section 2.2).

    weight (1 + gain e), with e = (kl - target) / target cut to at most `most` either way.

    Args:
        kl: of a whole sequence, a mean over the batch; target: what it should be, in nats, above 0.
        gain: how fast; the paper's 0.1 for each step. With a horizon, sequences a step over the horizon.

    Raises:
        ConfigError: target is not above 0.
    """
    if not target > 0:
        raise ConfigError(f"the KL's target is {target}", expected="above 0")
    return coef * (1 + gain * max(-max_error, min(max_error, kl / target - 1)))
