"""A model for a smaller budget from a run that is there already: the step `branch`.

    [steps.pretrain]
    parents = ["plan", "tokens", "tokenizer"]
    branches = [0.25, 0.5]

    [steps.quarter]
    uses = "branch"
    parents = ["pretrain", "tokens", "tokenizer"]
    share = 0.25

The branch goes on from the state that the pretraining kept at the end of that share's plateau, and decays. What comes out is
the model that a run planned for a quarter of the steps would have given (`train/lm/decay_branches.py`), for the price of its decay.
"""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.model import model_folder, train_and_save
from whorl.train.checkpoint.remote import CheckpointConfig


class DecayBranchConfig(BaseModel):
    """Which branch; all else is as the pretraining was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fraction: float = Field(
        default=0.5, gt=0, lt=1, description="of the pretraining's steps, one of its `branches`"
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many stay, and where else they go"
    )


@step(
    "model",
    config=DecayBranchConfig,
    not_hashed=("checkpoint_seconds", "checkpoints"),
    parents={"model": "model", "tokens": "tokens", "tokenizer": "tokenizer"},
)
def decay_branch(ctx: StepContext, config: DecayBranchConfig) -> None:
    """Decay from the plateau of a pretraining run."""
    from whorl.train.job import Job
    from whorl.train.lm import decay_branches as branches

    folder = model_folder(ctx)
    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    start = branches.branch_state_folder(folder, config.fraction)
    trained = json.loads((folder / "job.json").read_text())
    trained["tokens"] = str(ctx.parents["tokens"].path)  # where they lie today
    if trained["stream"] is not None:
        trained["stream"]["tokenizer"] = str(ctx.parents["tokenizer"].path)
    stable = Job.model_validate(trained)
    job, at = branches.branch_job(stable, config.fraction), branches.branch_step(stable, config.fraction)
    ctx.progress.log(f"    {at:,} of {job.steps:,} steps are those of {ctx.parents['model'].name}")
    curve = json.loads((folder / "curve.json").read_text())
    train_and_save(
        ctx,
        job,
        config.checkpoints,
        checkpoint_seconds=config.checkpoint_seconds,
        start=start,
        previous_curve=[record for record in curve if record["step"] <= at],
    )
    ctx.summary.update(branched_at=at, steps_trained=job.steps - at)
