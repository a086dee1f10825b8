"""Alignment: training after pretraining, from conversations, preferences, rewards and teachers.

The names below are imported at their first use, so that `align.config` can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.align.config import (
        DistilConfig,
        LoRAConfig,
        PreferenceConfig,
        RewardConfig,
        SFTConfig,
    )
    from whorl.align.distillation.cached_teacher import CachedTeacher
    from whorl.align.distillation.teacher import LiveTeacher
    from whorl.align.distillation.train import train_student
    from whorl.align.model.policy_model import PolicyModel, frozen_reference
    from whorl.align.preference.dpo import train_preferences
    from whorl.align.preference.pairs import PreferencePair, UnpairedExample
    from whorl.align.preference.reward_model import RewardModel, score_completions, train_reward_model
    from whorl.align.rl.config import RLConfig
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.sft import fine_tune

_MODULES = {
    "config": ("DistilConfig", "LoRAConfig", "PreferenceConfig", "RewardConfig", "SFTConfig"),
    "distillation.cached_teacher": ("CachedTeacher",),
    "distillation.teacher": ("LiveTeacher",),
    "distillation.train": ("train_student",),
    "model.policy_model": ("PolicyModel", "frozen_reference"),
    "preference.dpo": ("train_preferences",),
    "preference.pairs": ("PreferencePair", "UnpairedExample"),
    "preference.reward_model": ("RewardModel", "score_completions", "train_reward_model"),
    "rl.config": ("RLConfig",),
    "rl.rollout": ("RolloutWorker",),
    "rl.train": ("train_policy",),
    "stage.sft": ("fine_tune",),
}
__all__ = [
    "CachedTeacher",
    "DistilConfig",
    "LiveTeacher",
    "LoRAConfig",
    "PolicyModel",
    "PreferenceConfig",
    "PreferencePair",
    "RLConfig",
    "RewardConfig",
    "RewardModel",
    "RolloutWorker",
    "SFTConfig",
    "UnpairedExample",
    "fine_tune",
    "frozen_reference",
    "score_completions",
    "train_policy",
    "train_preferences",
    "train_reward_model",
    "train_student",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
