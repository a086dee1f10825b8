"""The step `decay_branch`: a model for a smaller budget from an existing pretraining run.

    [steps.pretrain]
    parents = ["plan", "tokens", "tokenizer"]
    decay_branches = [0.25, 0.5]

    [steps.quarter]
    uses = "decay_branch"
    parents = ["pretrain", "tokens", "tokenizer"]
    fraction = 0.25

The branch starts from the state that pretraining stored at this fraction of its plateau, and decays the learning rate. The
result equals a run planned for a quarter of the steps (`train/lm/decay_branches.py`), at the cost of the decay alone.
"""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.pretrain.train_job import train_and_save
from whorl.train.config import RunConfig


class DecayBranchConfig(BaseModel):
    """The branch to train; all other settings are those of the pretraining run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fraction: float = Field(
        default=0.5, gt=0, lt=1, description="of the pretraining steps; one of its `decay_branches`"
    )
    run: RunConfig = Field(default=RunConfig(), description="checkpoints")

    @model_validator(mode="after")
    def _validate(self) -> DecayBranchConfig:
        self.run.refuse(
            **dict.fromkeys(("activation_budget", "replicas"), "it is that of the pretraining run")
        )
        return self


@step(
    "model",
    config=DecayBranchConfig,
    not_hashed=("run",),
    parents={"model": "model", "tokens": "tokens", "tokenizer": "tokenizer"},
    version=2,
)
def decay_branch(ctx: StepContext, config: DecayBranchConfig) -> None:
    """Decay the learning rate from the plateau of a pretraining run."""
    from whorl.train.job import Job, read_job
    from whorl.train.lm import decay_branches as branches

    folder = ctx.parent_folder("model")
    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    start = branches.branch_state_folder(folder, config.fraction)
    trained = read_job(folder)
    trained["tokens"] = str(ctx.parents["tokens"].path)
    if trained["stream"] is not None:
        trained["stream"]["tokenizer"] = str(ctx.parents["tokenizer"].path)
    parent_job = Job.model_validate(trained)
    job, at = (
        branches.branch_job(parent_job, config.fraction),
        branches.branch_step(parent_job, config.fraction),
    )
    ctx.progress.log(f"    {at:,} of {job.steps:,} steps come from {ctx.parents['model'].name}")
    curve = json.loads((folder / "curve.json").read_text())
    train_and_save(
        ctx,
        job,
        config.run,
        start=start,
        previous_curve=[record for record in curve if record["step"] <= at],
    )
    ctx.summary.update(branched_at=at, steps_trained=job.steps - at)
