"""The step `pretrain`: from a plan to a trained model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.blocks import expand_globs
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.pretrain.train_job import train_and_save
from whorl.recipes.steps.tokens import read_plan
from whorl.store import Store
from whorl.train.config import MASKED, PretrainObjectiveName, RunConfig, TrainConfig
from whorl.train.stream_config import TextStreamConfig

if TYPE_CHECKING:
    from whorl.train.job import Job


class PretrainStreamConfig(TextStreamConfig):
    """Raw files that are tokenized during training; their content is part of the address."""

    fingerprints: list[str] = Field(default=[], description="of the files; computed")


class PretrainTrainConfig(TrainConfig):
    """The update loop of pretraining; the plan decides learning rates and the compute type."""

    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="rows per forward pass and replica; fewer need less memory; default: all",
    )
    bf16_weights: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description="store the weight matrices of the blocks in bfloat16 with this rounding; default: fp32 master weights",
    )


class PretrainConfig(BaseModel):
    """Execution of the planned run; the plan decides model, data and number of steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: PretrainStreamConfig | None = Field(
        default=None, description="train on raw files, tokenized during training, instead of the token set"
    )

    objective: PretrainObjectiveName = "next_token"
    block: int | None = Field(default=None, ge=2, description="positions of a block of masked")
    seed: int | None = Field(default=None, ge=0, description="default: the seed of the plan")
    decay_branches: list[float] = Field(
        default=[],
        description="fractions of the steps at which a step `decay_branch` may start to decay",
    )
    serial_loader: bool = Field(
        default=False, description="fill batches in the training process, for debugging"
    )
    layout: str | None = Field(
        default=None, description="of the ranks of `whorl launch`: dp=2,tp=2,pp=2, or auto (docs/parallel.md)"
    )
    train: PretrainTrainConfig = Field(default=PretrainTrainConfig(), description="the update loop")
    run: RunConfig = Field(default=RunConfig(), description="checkpoints and memory")

    @model_validator(mode="after")
    def _validate(self) -> PretrainConfig:
        self.run.refuse(replicas="the plan decides it: set plan.replicas")
        if self.block is not None and self.objective != MASKED:
            raise ValueError(f"block ({self.block}) belongs to objective = 'masked'")
        if self.decay_branches:
            from whorl.train.lm.decay_branches import check_fractions  # imports torch

            check_fractions(self.decay_branches, self.train.schedule)
        return self


def _with_file_hashes(config: PretrainConfig, store: Store) -> PretrainConfig:
    """Replace patterns by files and add their fingerprints, so that the address changes with the content."""
    if config.stream is None:
        return config
    sources = [replace(source, files=expand_globs(source.files)) for source in config.stream.sources]
    fingerprints = [source.open().fingerprint for source in sources]
    stream = config.stream.model_copy(update={"sources": sources, "fingerprints": fingerprints})
    return config.model_copy(update={"stream": stream})


@step(
    "model",
    config=PretrainConfig,
    complete_config=_with_file_hashes,
    not_hashed=("run", "serial_loader", "layout"),
    parents={"plan": "plan", "tokens": "tokens", "tokenizer": "tokenizer"},
    version=3,
)
def pretrain(ctx: StepContext, config: PretrainConfig) -> None:
    """Train the planned model."""
    from whorl.plan.layout_cost import predicted_step
    from whorl.report.training import parallel_blocks
    from whorl.train.lm import decay_branches as branches
    from whorl.train.lm.laid_out import PARALLEL_FILE

    job = build_job(ctx, config)
    points = {share: branches.branch_step(job, share) for share in config.decay_branches}
    train_and_save(
        ctx,
        job,
        config.run,
        branch_steps=[*points.values()],
    )
    if points:
        ctx.summary["branches"] = branches.export_branches(ctx.scratch, ctx.out, points, ctx.progress.log)
    if job.layout is not None and (trace := ctx.scratch / PARALLEL_FILE).exists():
        expected = ctx.parents["plan"].summary["expected"]
        predicted, measured = predicted_step(job, expected.get("mfu", 0.4)), json.loads(trace.read_text())
        sent = (sum(total[1] for total in side["totals"].values()) for side in (measured, predicted))
        ctx.summary["sent_bytes"], ctx.summary["expected"] = next(sent), {"sent_bytes": next(sent)}
        ctx.report.blocks += parallel_blocks(measured, predicted)


def build_job(ctx: StepContext, config: PretrainConfig) -> Job:
    """Return the planned job on the parents' tokens; `pretrain` trains it and `whorl profile` measures it."""
    from whorl.models.transformer_config import masked_decoder
    from whorl.tokens.shards import TokenSet
    from whorl.train.job import Job

    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    planned = read_plan(ctx).job
    deterministic = config.train.deterministic or planned.deterministic
    vocab_size, model = TokenSet(ctx.parents["tokens"].path).vocab_size, planned.model
    if vocab_size > model.vocab_size:
        model = model.model_copy(update={"vocab_size": vocab_size})
    if config.objective == MASKED:
        model = masked_decoder(model, vocab_size, config.block, planned.seq_len)
    job = Job.model_validate(
        {
            **dict(planned),
            **dict(config.train),
            "tokens": str(ctx.parents["tokens"].path),
            "stream": _stream_settings(ctx, config),
            "model": model,
            "long_ratio": 0.0
            if config.stream is not None or model.masked is not None
            else planned.long_ratio,
            "serial_loader": config.serial_loader,
            "objective": config.objective,
            "activation_budget": config.run.activation_budget,
            "deterministic": deterministic,
            # No clock decides where equal bits are required, nor where branches start at planned steps.
            "seconds": None if deterministic or config.decay_branches else planned.seconds,
            "seed": planned.seed if config.seed is None else config.seed,
        }
    )
    if config.layout is None:
        return job
    from whorl.plan.layout_cost import with_layout

    return with_layout(job, config.layout, ctx.progress.log)


def _stream_settings(ctx: StepContext, config: PretrainConfig) -> dict[str, object] | None:
    if config.stream is None:
        return None
    tokenizer = str(ctx.parents["tokenizer"].path)
    return {**config.stream.model_dump(mode="json", exclude={"fingerprints"}), "tokenizer": tokenizer}
