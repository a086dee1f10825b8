"""Settings that steps which train have in common. Imports no torch, so a recipe can be checked fast.

    data     `DataConfig`: length and number of the rows of text of a step
    train    `TrainConfig`: the update loop (schedule, averaged weights, spike guard); decides the weights
    run      `RunConfig`: checkpoints, memory and processes; decides no weight and is not part of an address

A step embeds them under these names, and adds the settings of its method. Stages also have `model` (`align/config.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from whorl.machine.memory import MemoryText
from whorl.registry import Registry

OPTIMIZERS = (
    Registry(  # of dense parameters (`optim/optimizer.py`); replicas share the parameters in this order
        "optimizer",
        {
            "muon": "whorl.train.optim.optimizers:Muon",
            "adamw": "whorl.train.optim.optimizers:AdamW",
            "soap": "whorl.train.optim.soap:SOAP",
        },
    )
)
# Of logits (`lm/token_objective.py`); the setting "next_token" takes the fused loss, which is equal.
TOKEN_OBJECTIVES = Registry("objective", {"next_token": "whorl.objectives.next_token:next_token_of_logits"})
MASKED = "masked"  # masked diffusion, of pretraining only; it is no function of logits and targets
TokenObjectiveName = Annotated[
    str,
    AfterValidator(TOKEN_OBJECTIVES.check),
    Field(description="next_token, or module:attribute of a function of logits, targets and mask"),
]
PretrainObjectiveName = Annotated[
    str,
    AfterValidator(lambda name: name if name == MASKED else TOKEN_OBJECTIVES.check(name)),
    Field(description="next_token, masked, or module:attribute of a function of logits, targets and mask"),
]
OptimizerName = Annotated[str, AfterValidator(OPTIMIZERS.check)]


class OptimConfig(BaseModel):
    """Peak learning rates and related settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: OptimizerName = Field(
        default="muon",
        description="optimizer of the blocks' matrices: muon, adamw, soap, or a registered one",
    )
    lr_muon: float = Field(default=0.02, gt=0, description="peak, Muon: matrices of the blocks")
    lr_adamw: float = Field(
        default=0.003,
        gt=0,
        description="peak, AdamW and others: matrices of the blocks, if optimizer is not muon",
    )
    muon_every: int = Field(
        default=2, ge=1, description="steps between updates of a matrix; the update is larger by this factor"
    )
    expert_lr_scales: float | dict[int, float] = Field(
        default=1.0,
        description="multiple of the experts' learning rates: of all, or by the expert's number in its layer",
    )
    lr_embedding: float = Field(default=0.006, gt=0, description="peak, AdamW: embedding and head")
    lr_scalar: float = Field(default=0.01, gt=0, description="peak, AdamW: gains and temperatures")
    lr_ngram: float = Field(default=0.05, gt=0, description="peak, sparse Adagrad: n-gram tables")
    momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(
        default=0.0, ge=0, description="of weight matrices; times the learning rate, per step"
    )
    fused: bool | None = Field(
        default=None,
        description="torch's fused AdamW kernel (other last bits); default: on CUDA, in bf16 and fp32 on a CPU by timing",
    )
    mup_base_width: int | None = Field(
        default=None,
        ge=1,
        description="muP: the width (d_model) at which the learning rates were tuned (mup.py)",
    )
    clip_norm: float = Field(
        default=1.0, gt=0, description="norm limit of the mean gradient, over all dense parameters"
    )


class ScheduleConfig(BaseModel):
    """The shape of the learning-rate schedule (`optim/lr_schedule.py`). Ratios are fractions of the run's steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup_ratio: float = Field(default=0.02, ge=0, lt=1, description="fraction of the steps for warm-up")
    warmup_steps: float | None = Field(
        default=None, ge=0, description="warm-up in steps, in place of the ratio"
    )
    decay_ratio: float = Field(
        default=0.5, gt=0, le=1, description="fraction of the steps for the decay of wsd"
    )
    min_lr_ratio: float = Field(
        default=0.02, ge=0, le=1, description="final learning rate as a fraction of the peak"
    )

    @model_validator(mode="after")
    def _possible(self) -> ScheduleConfig:
        def given(name: str) -> bool:  # by value: a configuration read from a file names every field
            return bool(getattr(self, name) != type(self).model_fields[name].default)

        if given("decay_ratio") and self.kind != "wsd":
            falls = "does not fall" if self.kind == "constant" else "falls from the end of the warm-up on"
            raise ValueError(
                f"decay_ratio ({self.decay_ratio:g}) belongs to kind = 'wsd'; {self.kind!r} {falls}"
            )
        if given("min_lr_ratio") and self.kind == "constant":
            raise ValueError(
                f"min_lr_ratio ({self.min_lr_ratio:g}) belongs to a schedule that falls; 'constant' does not"
            )
        if given("warmup_ratio") and self.warmup_steps is not None:
            raise ValueError(
                f"both warmup_ratio ({self.warmup_ratio:g}) and warmup_steps ({self.warmup_steps:g}) are set: give one"
            )
        if (
            self.kind == "wsd"
            and self.warmup_steps is None
            and self.warmup_ratio + self.decay_ratio > 1 + 1e-9
        ):
            raise ValueError(
                f"warmup_ratio ({self.warmup_ratio:g}) + decay_ratio ({self.decay_ratio:g}) is above 1: together at most 1"
            )
        return self


class RoutingConfig(BaseModel):
    """Load balancing of mixtures of experts (`nn/experts`); ignored by models without experts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aux_loss_coef: float = Field(
        default=0.01, ge=0, description="weight of the load-balancing loss, per layer"
    )
    z_loss_coef: float = Field(default=1e-3, ge=0, description="weight of the router's z-loss, per layer")
    bias_update_rate: float = Field(
        default=1e-3, ge=0, description="step size of the balancing bias, for routers with one"
    )
    freeze_router_step: int | None = Field(
        default=None,
        ge=0,
        description="step from which routers and their balancing biases keep their values; default: never",
    )


class SpikeGuardConfig(BaseModel):
    """Settings of the spike guard (`resilience/spike_guard.py`). All counts are in steps: no clock decides a weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(
        default=10.0,
        ge=0,
        description="robust standard deviations above the median at which a batch is skipped; 0: never",
    )
    window: int = Field(default=128, ge=8, description="number of recent steps in the statistics")
    patience: int = Field(default=8, ge=1, description="bad steps in a row before a rollback")
    max_rollbacks: int = Field(default=2, ge=0, description="rollbacks before training stops")
    max_skipped: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="fraction of the steps that may be skipped before training stops",
    )
    snapshot_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between snapshots; default: an eighth of the run, at least patience",
    )


class FiniteGuardConfig(SpikeGuardConfig):
    """A spike guard that skips non-finite batches only, unless a threshold is set. Rewards and preferences have outliers."""

    threshold: float = Field(
        default=0.0,
        ge=0,
        description="robust standard deviations above the median at which a batch is skipped; 0: never",
    )


class DataConfig(BaseModel):
    """Rows of token ids: their length, and their number in a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seq_len: int = Field(default=256, ge=8, description="positions of a row")
    batch_size: int = Field(default=8, ge=1, description="rows per step")


class TrainConfig(BaseModel):
    """The update loop: learning-rate schedule, averaged weights, spike guard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: ScheduleConfig = ScheduleConfig()
    ema: float = Field(
        default=0.0, ge=0, lt=1, description="decay per step of averaged weights, which are saved; 0 for none"
    )
    spike_guard: SpikeGuardConfig = Field(
        default=SpikeGuardConfig(), description="skips batches whose loss or gradient norm is far off"
    )
    deterministic: bool = Field(default=False, description="no timing affects the result")


class FiniteTrainConfig(TrainConfig):
    """The update loop of methods whose losses have outliers: the spike guard skips non-finite batches only."""

    spike_guard: FiniteGuardConfig = Field(
        default=FiniteGuardConfig(),
        description="skips non-finite batches; with a threshold also batches whose loss or gradient norm is far off",
    )


class CheckpointConfig(BaseModel):
    """Retention of local checkpoints, and remote storage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: int = Field(default=2, ge=1, description="number of checkpoints kept on the local disk")
    keep_hours: float | None = Field(
        default=None, gt=0, description="maximum age of these, except the newest"
    )
    remote_url: str | None = Field(default=None, description="folder or URL of remote storage")
    remote_interval: float = Field(default=600.0, ge=0, description="seconds between uploads")
    remote_keep: int = Field(default=3, ge=1, description="number of checkpoints kept there")
    remote_keep_hours: float | None = Field(
        default=None, gt=0, description="maximum age of these, except the newest"
    )


class RunConfig(BaseModel):
    """How a step runs. No field decides a weight, so an interrupted step continues with other values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many are kept, and a remote copy"
    )
    activation_budget: MemoryText | None = Field(
        default=None,
        description="memory for activations, 2GB or 25%; blocks beyond it are recomputed in the backward; default: no limit",
    )
    replicas: int | None = Field(
        default=None, ge=1, description="training processes; default: one per core where that pays"
    )

    def refuse(self, **unsupported: str) -> None:
        """Raise ValueError if a field that the step does not support is set; `unsupported` gives the reasons."""
        for name, why in unsupported.items():
            if getattr(self, name) is not None:
                raise ValueError(f"run.{name} is {getattr(self, name)}: {why}; remove it")


class RowScheduleConfig(FiniteTrainConfig):
    """The update loop of models that are trained on rows."""

    schedule: ScheduleConfig = ScheduleConfig(kind="cosine", warmup_ratio=0.05)


class RowTrainConfig(BaseModel):
    """Training on rows in a seeded order with AdamW (`rows.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=64, ge=2, description="images or texts per step")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.05, ge=0, description="of weight matrices")
    seed: int = Field(default=0, ge=0)
    threads: int | None = Field(
        default=None,
        ge=1,
        description="default: the fastest number for large matrix products; 1 suits tiny networks",
    )
    train: RowScheduleConfig = Field(default=RowScheduleConfig(), description="the update loop")
    run: RunConfig = Field(default=RunConfig(), description="checkpoints and processes")

    @model_validator(mode="after")
    def _validate(self) -> RowTrainConfig:
        self.run.refuse(activation_budget="these models recompute nothing")
        return self


ROWS_NOT_HASHED = ("run", "threads")
