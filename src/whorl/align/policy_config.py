"""Settings of a policy objective: the KL penalty, and overrides of an algorithm's arguments.

Importable without torch. Formulas are in `objectives/llm_policy.py` and `objectives/advantages/group_advantages.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class KLConfig(BaseModel):
    """KL penalty between the policy and the reference."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coef: float = Field(
        default=0.0,
        ge=0,
        description="weight; default 0 with every algorithm: no reference is loaded. The paper of GRPO uses 0.04",
    )
    apply_to: Literal["loss", "reward"] | None = Field(
        default=None,
        description="a term of the loss (default of GRPO and its variants) or of the reward (of RLOO and PPO)",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None,
        description="k3 by default, k1 with RLOO and PPO (objectives/divergences.py)",
    )
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="KL in nats per token that the coefficient is adapted to (arXiv:1909.08593)",
    )


class PolicyLossOverrides(BaseModel):
    """Overrides of the algorithm's arguments in `objectives/llm_policy.py`; None keeps the algorithm's value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: Literal["none", "token", "sequence"] | None = Field(
        default=None, description="probability ratio of each token, of the sequence, or none"
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="bound of the surrogate for negative advantages, as a multiple of the advantage",
    )
    aggregation: Literal["token", "sequence", "constant"] | None = Field(
        default=None,
        description="loss aggregation: mean over tokens, over completions, or divide by max_completion_tokens (Dr. GRPO)",
    )
    baseline: Literal["none", "batch", "group", "leave_one_out", "running"] | None = Field(
        default=None,
        description="subtracted from a reward: nothing, a mean, or a decayed mean of earlier batches",
    )
    running_decay: float = Field(
        default=0.9, ge=0, lt=1, description="baseline running: decay of the mean per rollout batch"
    )
    scale_rewards: Literal["none", "biased", "unbiased"] | None = Field(
        default=None, description="standard deviation that divides the advantage"
    )
    scale_over: Literal["baseline", "batch", "advantages"] = Field(
        default="baseline",
        description="deviation of the rewards that the baseline compares, of the batch's rewards (TRL's "
        '"batch"), or of the batch\'s advantages (REINFORCE++-baseline)',
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of an entropy bonus")
