"""Objectives and estimators: pure functions of tensors that return a summed loss, its count and metrics.

The names below are imported at their first use, so that `catalog` can be read without torch. The function `next_token` has
the name of its module: `from whorl.objectives.next_token import next_token`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.objectives.actor_critic import ActorCriticOutput, a2c, ppo
    from whorl.objectives.advantages.estimators import (
        Trajectory,
        VTrace,
        discounted_returns,
        gae,
        n_step_returns,
        td_lambda_returns,
        v_trace,
    )
    from whorl.objectives.advantages.group_advantages import GroupAdvantages, group_advantages
    from whorl.objectives.advantages.importance import ImportanceStats, importance_weights
    from whorl.objectives.advantages.token_gae import token_gae, whiten
    from whorl.objectives.classify import classification
    from whorl.objectives.contrastive import info_nce
    from whorl.objectives.distil import distil_full_vocab, distil_top_k, divergence
    from whorl.objectives.divergences import adapt_kl_coef, kl_estimate, kl_reward
    from whorl.objectives.llm_policy import (
        CompletionTokens,
        PolicyLossConfig,
        overlong_reward,
        policy_loss,
        value_loss,
    )
    from whorl.objectives.log_probs import (
        cross_entropy,
        masked_mean,
        masked_normalize,
        token_entropy,
        token_log_probs,
    )
    from whorl.objectives.next_token import Loss
    from whorl.objectives.preference import PairLogProbs, dpo, ipo, kto, kto_kl, orpo, simpo
    from whorl.objectives.reward import bradley_terry

_MODULES = {
    "actor_critic": ("ActorCriticOutput", "a2c", "ppo"),
    "advantages.estimators": (
        "Trajectory",
        "VTrace",
        "discounted_returns",
        "gae",
        "n_step_returns",
        "td_lambda_returns",
        "v_trace",
    ),
    "advantages.group_advantages": ("GroupAdvantages", "group_advantages"),
    "advantages.importance": ("ImportanceStats", "importance_weights"),
    "advantages.token_gae": ("token_gae", "whiten"),
    "classify": ("classification",),
    "contrastive": ("info_nce",),
    "distil": ("distil_full_vocab", "distil_top_k", "divergence"),
    "divergences": ("adapt_kl_coef", "kl_estimate", "kl_reward"),
    "llm_policy": ("CompletionTokens", "PolicyLossConfig", "overlong_reward", "policy_loss", "value_loss"),
    "log_probs": ("cross_entropy", "masked_mean", "masked_normalize", "token_entropy", "token_log_probs"),
    "next_token": ("Loss",),
    "preference": ("PairLogProbs", "dpo", "ipo", "kto", "kto_kl", "orpo", "simpo"),
    "reward": ("bradley_terry",),
}
__all__ = [
    "ActorCriticOutput",
    "CompletionTokens",
    "GroupAdvantages",
    "ImportanceStats",
    "Loss",
    "PairLogProbs",
    "PolicyLossConfig",
    "Trajectory",
    "VTrace",
    "a2c",
    "adapt_kl_coef",
    "bradley_terry",
    "classification",
    "cross_entropy",
    "discounted_returns",
    "distil_full_vocab",
    "distil_top_k",
    "divergence",
    "dpo",
    "gae",
    "group_advantages",
    "importance_weights",
    "info_nce",
    "ipo",
    "kl_estimate",
    "kl_reward",
    "kto",
    "kto_kl",
    "masked_mean",
    "masked_normalize",
    "n_step_returns",
    "orpo",
    "overlong_reward",
    "policy_loss",
    "ppo",
    "simpo",
    "td_lambda_returns",
    "token_entropy",
    "token_gae",
    "token_log_probs",
    "v_trace",
    "value_loss",
    "whiten",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
