"""Settings of the stages after pretraining, importable without torch so that a recipe can be checked quickly.

Learning rates are a multiple of pretraining's rates (`train/config.py`): a stage continues with the same optimizers
on the same parameters. Reinforcement learning has its settings in `align/rl/config.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from whorl.registry import Registry
from whorl.train.config import (
    DataConfig,
    FiniteTrainConfig,
    OptimConfig,
    OptimizerName,
    RoutingConfig,
    RunConfig,
    ScheduleConfig,
    TokenObjectiveName,
)

PREFERENCE_OBJECTIVES = Registry(
    "preference objective",
    {name: f"whorl.objectives.preference:{name.upper()}" for name in ("dpo", "ipo", "kto", "simpo", "orpo")},
)
PreferenceObjectiveName = Annotated[str, AfterValidator(PREFERENCE_OBJECTIVES.check)]
Divergence = Literal["forward", "reverse", "jensen"]
DType = Literal["float32", "bfloat16", "float16"]


class LoRAConfig(BaseModel):
    """A LoRA adapter, trained in place of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0, description="scale of the adapter, divided by the rank")
    target_modules: tuple[str, ...] = Field(
        default=(), description="name suffixes, as 'mixer.q'; default: all matrices of the blocks"
    )
    merge: bool = Field(
        default=True, description="merge the adapter into the saved weights; else save it separately"
    )


class ModelConfig(BaseModel):
    """How a stage loads and adapts the model that it starts from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora: LoRAConfig | None = Field(default=None, description="train an adapter instead of the weights")
    dtype: DType | None = Field(
        default=None, description="compute dtype; default: the fastest on this machine"
    )


class StageTrainConfig(FiniteTrainConfig):
    """The update loop of a stage after pretraining."""

    schedule: ScheduleConfig = ScheduleConfig(warmup_ratio=0.05)
    clip_norm: float = Field(default=1.0, gt=0, description="of the mean gradient")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="approximate positions of a forward pass with gradients"
    )
    routing: RoutingConfig = Field(
        default=RoutingConfig(), description="load balancing of experts, and router freezing"
    )
    expert_lr_scales: float | dict[int, float] = Field(
        default=1.0, description="multiple of the experts' learning rates: of all, or by the expert's number"
    )


class StageConfig(BaseModel):
    """Settings of every stage that trains weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr_scale: float = Field(default=0.1, gt=0, description="multiple of pretraining's learning rates")
    optimizer: OptimizerName = Field(default="muon", description="optimizer of the blocks' matrices")
    seed: int = Field(default=0, ge=0)
    model: ModelConfig = Field(default=ModelConfig(), description="adapter and compute dtype")
    train: StageTrainConfig = Field(default=StageTrainConfig(), description="the update loop")
    run: RunConfig = Field(default=RunConfig(), description="checkpoints, memory and processes")

    def optim(self) -> OptimConfig:
        """Return the optimizer settings of this stage."""
        usual = OptimConfig()
        rates = {
            name: getattr(usual, name) * self.lr_scale
            for name in ("lr_muon", "lr_adamw", "lr_embedding", "lr_scalar", "lr_ngram")
        }
        return usual.model_copy(
            update={
                **rates,
                "optimizer": self.optimizer,
                "muon_every": 1,
                "clip_norm": self.train.clip_norm,
                "expert_lr_scales": self.train.expert_lr_scales,
            }
        )


class StageDataConfig(DataConfig):
    """The texts of a stage: how many a step has, and how often each is read."""

    seq_len: int = Field(
        default=512, ge=8, description="positions of a row; longer texts are rejected and counted"
    )
    batch_size: int = Field(default=32, ge=1, description="texts per step")
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens of a step without padding, at most, in place of batch_size",
    )
    epochs: float = Field(default=1.0, gt=0, description="passes over the texts")
    packing: bool = Field(default=True, description="several texts per row, with a document mask")

    @model_validator(mode="after")
    def _one_batch_limit(self) -> StageDataConfig:
        if self.batch_tokens is not None and self.batch_size != type(self).model_fields["batch_size"].default:
            raise ValueError(
                f"batch_size is {self.batch_size} and batch_tokens is {self.batch_tokens}: set one of them"
            )
        return self


class SFTDataConfig(StageDataConfig):
    """The texts of supervised fine-tuning, and those of pretraining between them."""

    batch_size: int = Field(default=16, ge=1, description="rows per step")
    replay_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of a step's rows (or tokens) from pretraining data, against forgetting",
    )


class PreferenceDataConfig(StageDataConfig):
    """Preferences: a row is a prompt with one of its completions."""

    batch_size: int = Field(default=32, ge=1, description="pairs per step; KTO: completions per step")
    packing: bool = Field(default=False, description="several texts per row, with a document mask")


class DatasetStageConfig(StageConfig):
    """Settings of every stage over a data set of texts."""

    data: StageDataConfig = Field(default=StageDataConfig(), description="the texts of a step")


class SFTConfig(DatasetStageConfig):
    """Supervised fine-tuning."""

    objective: TokenObjectiveName = "next_token"
    data: SFTDataConfig = Field(default=SFTDataConfig(), description="the texts of a step")


class MultiTokenModelConfig(ModelConfig):
    """How the trunk of multi-token heads is loaded."""

    lora: None = Field(default=None, description="unsupported: heads are trained in full")


class MultiTokenConfig(SFTConfig):
    """Multi-token heads of a trained model; formula in `models/multi_token.py`."""

    objective: Literal["next_token"] = Field(default="next_token", description="of every head")
    lr_scale: float = Field(default=1.0, gt=0, description="multiple of pretraining's learning rates")
    n_predict: int = Field(
        default=4, ge=2, le=16, description="tokens that the heads predict; all but the first are drafts"
    )
    mlp_hidden: int | None = Field(default=None, ge=1, description="of each head; default: 4 times the width")
    train_trunk: bool = Field(default=False, description="train the model too, with its own next-token loss")
    model: MultiTokenModelConfig = Field(default=MultiTokenModelConfig(), description="compute dtype")


class DistilConfig(DatasetStageConfig):
    """Distillation: the divergence, and whose completions it is computed on."""

    divergence: Divergence = Field(
        default="forward",
        description="forward is mode covering, reverse is mode seeking",
    )
    beta: float = Field(
        default=0.5, gt=0, lt=1, description="of jensen: forward in the limit 0, reverse in the limit 1"
    )
    temperature: float = Field(default=1.0, gt=0, description="of teacher and student, in the divergence")
    on_policy_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of a step's texts that the student samples",
    )
    max_completion_tokens: int = Field(default=64, ge=1, description="ids of an on-policy completion")
    sync_every: int = Field(default=1, ge=1, description="steps between updates of the sampling weights")

    @model_validator(mode="after")
    def _known_lengths(self) -> DistilConfig:
        if self.data.batch_tokens is not None and self.on_policy_fraction:
            raise ValueError(
                f"data.batch_tokens is {self.data.batch_tokens} and on_policy_fraction is {self.on_policy_fraction}: "
                "the lengths of completions are unknown before they are sampled; set data.batch_size"
            )
        return self

    @model_validator(mode="after")
    def _one_process(self) -> DistilConfig:
        self.run.refuse(replicas="distillation trains in one process")
        return self


class StudentConfig(BaseModel):
    """How a student is made from its teacher: reduced width, a subset of the layers, or pruning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="width relative to the teacher; the student is initialized randomly",
    )
    n_layers: int | None = Field(
        default=None,
        ge=1,
        description="layers, evenly spaced layers of the teacher unless width_multiplier is set",
    )
    n_heads: int | None = Field(default=None, ge=1, description="left by pruning in each layer")
    n_kv_heads: int | None = Field(default=None, ge=1, description="left by pruning in each layer")
    mlp_hidden: int | None = Field(default=None, ge=1, description="channels left by pruning")

    @model_validator(mode="after")
    def _possible(self) -> StudentConfig:
        if self.width_multiplier is not None and (self.n_heads or self.n_kv_heads or self.mlp_hidden):
            raise ValueError(
                "width_multiplier makes a randomly initialized student: there is nothing to prune"
            )
        return self


class PreferenceStageConfig(DatasetStageConfig):
    """Settings of every stage that learns from preferences."""

    data: PreferenceDataConfig = Field(
        default=PreferenceDataConfig(), description="the preferences of a step"
    )


class PreferenceConfig(PreferenceStageConfig):
    """Preference optimization; formulas in `objectives/preference.py`."""

    lr_scale: float = Field(default=0.02, gt=0, description="multiple of pretraining's learning rates")
    objective: PreferenceObjectiveName = Field(
        default="dpo", description="dpo, ipo, kto, simpo, orpo, or module:attribute of a PreferenceObjective"
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        description="the paper's beta (IPO: tau, ORPO: lambda); default: that of the objective",
    )
    gamma: float = Field(default=1.0, ge=0, description="SimPO: target margin")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="DPO: assumed share of wrong labels"
    )
    length_normalized: bool = Field(default=False, description="IPO: means over tokens instead of sums")
    desirable_weight: float = Field(default=1.0, description="KTO: weight of desirable completions")
    undesirable_weight: float = Field(default=1.0, description="KTO: weight of undesirable completions")


class RewardConfig(PreferenceStageConfig):
    """A reward model; formula in `objectives/reward.py`."""

    center_rewards_coef: float = Field(
        default=0.01, ge=0, description="weight of the penalty on the mean reward of a pair"
    )
