"""Policy-gradient objectives over tokens: REINFORCE, and the other methods as changes to it.

    total = - sum over tokens t of  w_t surrogate_t  +  kl_coef sum_t w_t kl_t  -  entropy_coef sum_t w_t H_t

    surrogate   REINFORCE   A log pi                                   (Williams 1992, doi:10.1007/BF00992696)
                expert iteration: the same with A = 1, of completions that pass: SFT on them (arXiv:2312.06585)
                PPO         min(r A, clip(r, 1 - low, 1 + high) A)     r = pi / pi_old (arXiv:1707.06347, eq. 7)
                DAPO        the same, high > low                       (arXiv:2503.14476, eq. 8)
                dual clip   max(the above, c A) where A < 0            (Ye et al. 2020, arXiv:1912.09729, eq. 5)
                GSPO        r of the sequence, (prod_t r_t)^(1/|y|)    (arXiv:2507.18071, eq. 5 to 7)

    aggregation token       w = 1,             count = tokens          DAPO, eq. 8
                sequence    w = 1 / |y|,       count = sequences that have a token        GRPO, arXiv:2402.03300, eq. 3
                constant    w = 1 / constant,  count = sequences       Dr. GRPO, arXiv:2503.20783: no length bias

The N tokens of S sequences are concatenated, without prompts and padding, so no mask is needed. Three policies have
three names. `behaviour` sampled the tokens. `proximal` is the denominator of the ratio: `behaviour`, or other weights
if the samples are stale (Hilton et al. 2021, arXiv:2110.00641). The third one is in training.

The subtle point is aggregation. A mean of micro-batch means weights a token by the size of its micro-batch. Here totals
are summed and divided once by the global count, so the split of a batch (never inside a sequence) changes nothing.

`PRESETS` maps methods to arguments. Metrics are sums for the same count: over tokens, or over sequences of token means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.objectives.advantages.group_advantages import Baseline, ScaleOver, StdEstimator
from whorl.objectives.divergences import MAX_LOG_RATIO, KLEstimator, kl_estimate
from whorl.objectives.next_token import Loss

RatioLevel = Literal["none", "token", "sequence"]
LossAggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class CompletionTokens:
    """N tokens of S sequences; fields are [N] unless noted.

    log_prob: of the policy in training, with gradient. behaviour_log_prob: of the policy that sampled.
    advantage: without gradient. sequence: int64 index from 0 to S - 1.
    n_sequences: S, where some sequences may have no token; default: the number of those that have one.
    proximal_log_prob: denominator of the ratio; default behaviour_log_prob. reference_log_prob: for the KL.
    entropy: with gradient. weight: from `advantages/importance.py`.
    """

    log_prob: Tensor
    behaviour_log_prob: Tensor
    advantage: Tensor
    sequence: Tensor
    n_sequences: int | None = None
    proximal_log_prob: Tensor | None = None
    reference_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.shape != self.log_prob.shape[:1]:
                raise ConfigError(
                    f"{name} is {list(value.shape)} but log_prob is {list(self.log_prob.shape)}",
                    expected="[N], one per token",
                )


@dataclass(frozen=True)
class PolicyLossConfig:
    """Arguments of a policy objective and of its advantages.

    ratio: "none" uses log pi. clip_low, clip_high: distance from 1 at which the gradient stops; None for no clip.
    dual_clip: c above. aggregation, constant: as above. entropy_coef: weight of the entropy bonus.
    kl_coef, kl_estimator, kl_apply_to: the KL penalty, its estimator, and whether it is part of the loss or of the
    reward.

    only_passed: train on the completions that pass alone, each with the reward 1.
    baseline, scale_rewards, scale_over: see `advantages/group_advantages.py`. Two parts of DAPO belong to its rollouts
    (`align/rl/config.py`): resampling of groups with equal rewards, and `overlong_reward`.
    """

    ratio: RatioLevel = "none"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: LossAggregation = "token"
    constant: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_apply_to: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    baseline: Baseline = "batch"
    scale_rewards: StdEstimator = "none"
    scale_over: ScaleOver = "baseline"
    only_passed: bool = False

    def __post_init__(self) -> None:
        for name, kind in (
            ("ratio", RatioLevel),
            ("aggregation", LossAggregation),
            ("kl_estimator", KLEstimator),
            ("baseline", Baseline),
            ("scale_rewards", StdEstimator),
            ("scale_over", ScaleOver),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}",
                    expected=one_of(str(getattr(self, name)), get_args(kind)),
                )
        if self.ratio == "none" and not (self.clip_low is self.clip_high is self.dual_clip is None):
            raise ConfigError('a clip is set, but ratio is "none"', do='set ratio to "token" or "sequence"')
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low is {self.clip_low}", expected="0 to 1: ratios are not negative")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ConfigError(f"clip_high is {self.clip_high}", expected="0 or more")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}", expected="above 1")


# kl_coef is the paper's; a stage replaces it by `kl.coef`, which is 0 by default (`align/policy_config.py`).
# As printed, REINFORCE and RLOO sum over a completion and average over completions. Token aggregation scales this only.
_REINFORCE = PolicyLossConfig()
_PPO = replace(
    _REINFORCE,
    ratio="token",
    clip_low=0.2,
    clip_high=0.2,
    baseline="critic",
    kl_estimator="k1",
    kl_apply_to="reward",
)
_GRPO = replace(
    _PPO,
    baseline="group",
    scale_rewards="unbiased",
    aggregation="sequence",
    kl_estimator="k3",
    kl_apply_to="loss",
    kl_coef=0.04,
)
PRESETS: Mapping[str, PolicyLossConfig] = MappingProxyType(
    {
        "reinforce": _REINFORCE,
        "rloo": replace(
            _REINFORCE, baseline="leave_one_out", kl_estimator="k1", kl_apply_to="reward"
        ),  # arXiv:2402.14740
        "ppo": _PPO,
        "grpo": _GRPO,
        "dr_grpo": replace(_GRPO, scale_rewards="none", aggregation="constant", kl_coef=0.0),
        "dapo": replace(_GRPO, clip_high=0.28, aggregation="token", kl_coef=0.0),
        "gspo": replace(_GRPO, ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),
        "expert_iteration": replace(_REINFORCE, baseline="none", only_passed=True),
    }
)


# By name in a configuration (`align/rl/config.py`).
REINFORCE, RLOO, PPO, GRPO, DR_GRPO, DAPO, GSPO, EXPERT_ITERATION = PRESETS.values()


def policy_loss(tokens: CompletionTokens, config: PolicyLossConfig) -> Loss:
    """Return the objective at the top of this file.

    Returns:
        Loss: `total` [], `count` [], and metrics, which are sums (see above):

            policy_loss, tokens     the first term, number of tokens
            entropy, kl             if given; KL to the reference
            kl/behaviour            k3 estimate of the KL between the sampling policy and this one
            ratio/mean, ratio/max   mean, and maximum of the sequence
            clip_fraction           tokens without gradient because of the clip

    Raises:
        ConfigError: constant aggregation without its constant, or a KL term without a reference.
    """
    lengths = _lengths(tokens.sequence, tokens.n_sequences, tokens.log_prob.dtype)
    weight, metric_weight, count = _aggregation_weights(
        tokens.sequence, lengths, tokens.n_sequences, config.aggregation, config.constant
    )
    surrogate, ratio, clipped = _surrogate(tokens, lengths, config)
    if tokens.weight is not None:
        surrogate = surrogate * tokens.weight
    policy = -(weight * surrogate).sum()
    total = policy
    behaviour_kl = kl_estimate(tokens.behaviour_log_prob, tokens.log_prob.detach(), "k3")
    ratio_max = torch.zeros_like(lengths).scatter_reduce(0, tokens.sequence, ratio, "amax")
    metrics = {
        "kl/behaviour": (metric_weight * behaviour_kl).sum(),
        "ratio/mean": (metric_weight * ratio).sum(),
        "ratio/max": (metric_weight * ratio_max[tokens.sequence]).sum(),
        "clip_fraction": (metric_weight * clipped).sum(),
        "tokens": lengths.sum(),
    }
    if tokens.reference_log_prob is not None:
        kl = kl_estimate(tokens.log_prob, tokens.reference_log_prob, config.kl_estimator)
        metrics["kl"] = (metric_weight * kl.detach()).sum()
        if config.kl_apply_to == "loss" and config.kl_coef:
            total = total + config.kl_coef * (weight * kl).sum()
    elif config.kl_apply_to == "loss" and config.kl_coef:
        raise ConfigError(
            f"kl_coef is {config.kl_coef}, and there is no reference",
            do="give reference_log_prob, or set kl_coef to 0",
        )
    if tokens.entropy is not None:
        metrics["entropy"] = (metric_weight * tokens.entropy.detach()).sum()
        if config.entropy_coef:
            total = total - config.entropy_coef * (weight * tokens.entropy).sum()
    elif config.entropy_coef:
        raise ConfigError(
            f"entropy_coef is {config.entropy_coef}, and there is no entropy", do="pass entropy"
        )
    return Loss(total, count, {"policy_loss": policy.detach(), **metrics})


def value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    sequence: Tensor,
    *,
    clip: float | None = 0.2,
    aggregation: LossAggregation = "token",
    constant: float | None = None,
    n_sequences: int | None = None,
) -> Loss:
    """Return the loss of a critic: squared errors, with the clipped value where that error is larger.

    total = sum_t w_t max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2) / 2     (the code of arXiv:1707.06347)

    Args:
        value: [N] with gradient. old_value: [N] at sampling time. target: [N] R. The others as in `policy_loss`.

    Returns:
        Loss with metrics value_loss and value_clip_fraction (tokens without gradient because of the clip).
    """
    for name, given in (("old_value", old_value), ("target", target), ("sequence", sequence)):
        if given.shape != value.shape:
            raise ConfigError(
                f"{name} is {list(given.shape)} but value is {list(value.shape)}", expected="[N]"
            )
    lengths = _lengths(sequence, n_sequences, value.dtype)
    weight, metric_weight, count = _aggregation_weights(sequence, lengths, n_sequences, aggregation, constant)
    squares = (value - target).square()
    clipped = torch.zeros_like(squares)
    if clip is not None:
        clipped_squares = (old_value + (value - old_value).clamp(-clip, clip) - target).square()
        clipped = (clipped_squares > squares).to(squares.dtype)
        squares = torch.maximum(squares, clipped_squares)
    total = 0.5 * (weight * squares).sum()
    return Loss(
        total, count, {"value_loss": total.detach(), "value_clip_fraction": (metric_weight * clipped).sum()}
    )


def overlong_reward(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return the reward penalty [S] of completions near the length limit (DAPO, arXiv:2503.14476, eq. 13).

    0 up to max_length - buffer tokens, then linear down to -1 at max_length, and -1 beyond.

    Args:
        lengths: [S] tokens of each completion.

    Raises:
        ConfigError: buffer is not within 1 to max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(
            f"buffer is {buffer}, and max_length is {max_length}", expected=f"1 to {max_length}"
        )
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1, 0)


def _lengths(sequence: Tensor, n_sequences: int | None, dtype: torch.dtype) -> Tensor:
    """Return [S] tokens per sequence; S is at least 1, so that indexing works."""
    minimum = max(1, n_sequences or 0)
    lengths = torch.bincount(sequence, minlength=minimum)
    if n_sequences is not None and len(lengths) > minimum:
        raise ConfigError(
            f"a token belongs to sequence {len(lengths) - 1}", expected=f"an index below {n_sequences}"
        )
    return lengths.to(dtype)


def _aggregation_weights(
    sequence: Tensor,
    lengths: Tensor,
    n_sequences: int | None,
    aggregation: LossAggregation,
    constant: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (w [N], weights of metrics [N], count [])."""
    ones = torch.ones_like(lengths[sequence])
    if aggregation == "token":
        return ones, ones, lengths.sum()
    each = 1 / lengths[sequence]
    n_nonempty = (lengths > 0).sum().to(lengths.dtype)
    if aggregation == "sequence":
        return each, each, n_nonempty
    if constant is None or not constant > 0:
        raise ConfigError(
            f'aggregation is "constant", and the constant is {constant}',
            expected="above 0",
            do="set it to the maximum number of completion tokens",
        )
    n_all = n_nonempty if n_sequences is None else torch.full_like(n_nonempty, float(n_sequences))
    return ones / constant, each, n_all


def _surrogate(
    tokens: CompletionTokens, lengths: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (surrogate [N] with gradient, ratio [N], clipped [N] 0 or 1)."""
    old = tokens.behaviour_log_prob if tokens.proximal_log_prob is None else tokens.proximal_log_prob
    log_ratio = tokens.log_prob - old
    if config.ratio == "sequence":
        mean = torch.zeros_like(lengths).index_add(0, tokens.sequence, log_ratio) / lengths.clamp(min=1)
        log_ratio = mean[tokens.sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantage = tokens.advantage
    if config.ratio == "none":
        return tokens.log_prob * advantage, ratio.detach(), torch.zeros_like(advantage)
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    high = float("inf") if config.clip_high is None else 1 + config.clip_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    if config.dual_clip is not None:
        worst = config.dual_clip * advantage
        clipped |= (advantage < 0) & (surrogate < worst)
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, worst), surrogate)
    return surrogate, ratio.detach(), clipped.to(advantage.dtype)
