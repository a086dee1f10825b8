"""The steps `plan` and `pretrain`: from a budget to a trained model."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.blocks import RawFiles, Source, expand_globs
from whorl.machine.memory import MemoryText
from whorl.plan.config import PlanConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.recipes.steps.pretrain_observer import PretrainObserver
from whorl.recipes.steps.tokens import read_plan
from whorl.report.training import plan_blocks, training_report
from whorl.train.checkpoint.remote import CheckpointConfig
from whorl.train.config import ScheduleConfig, SpikeGuardConfig

if TYPE_CHECKING:
    from whorl.train.job import Job


@step("plan", config=PlanConfig, parents=CORPUS_PARENTS, version=5)
def plan(ctx: StepContext, config: PlanConfig) -> None:
    """Time training steps on this machine and choose the configuration for the budget."""
    from whorl.plan.planner import make_plan

    corpus = open_corpus(ctx)
    made = make_plan(config, ctx.machine, corpus.bytes("train"), ctx.progress)
    (ctx.out / "plan.json").write_text(json.dumps(asdict(made), indent=2) + "\n")
    for line in made.arithmetic:
        ctx.progress.log(f"    {line}")
    job = made.job
    headline = (
        f"{job['model']['n_layers']} x {job['model']['d_model']}, vocabulary {made.vocab_size:,}, "
        f"{job['steps']:,} steps"
    )
    if "seconds" in made.expected:
        headline += f", {made.expected['seconds']:.0f} s expected"
    ctx.summary.update(
        expected=made.expected, arithmetic=made.arithmetic, budget=made.budget, headline=headline
    )
    ctx.report.blocks += plan_blocks(made.budget, made.expected, made.arithmetic)


class PretrainStreamConfig(BaseModel):
    """Raw files that are tokenized during training, instead of the training split of the token set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[Source] = Field(min_length=1, description="files (patterns, URLs), weight, final_weight")
    shuffle_bytes: int = Field(
        default=1 << 19, ge=1, description="bytes of raw text that are shuffled together"
    )
    block_bytes: int = Field(
        default=1 << 14,
        ge=1,
        description="raw text per read; for remote files use 1000000",
    )
    mixture_warmup_records: int = Field(
        default=1000, ge=1, description="records over which the weights change to final_weight"
    )
    workers: int = Field(default=1, ge=1, description="tokenizing processes per replica")
    fingerprints: list[str] = Field(default=[], description="of the files; computed")


class PretrainConfig(BaseModel):
    """Execution of the planned run; the plan decides model, data and number of steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: PretrainStreamConfig | None = Field(
        default=None, description="train on raw files, tokenized during training, instead of the token set"
    )

    seed: int | None = Field(default=None, description="default: the seed of the plan")
    ema: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay per step of averaged weights, 0 for none; default: the plan's",
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="rows per forward pass and replica; fewer need less memory; default: all",
    )
    activation_budget: MemoryText | None = Field(
        default=None,
        description="memory for activations, 2GB or 25%; blocks beyond it are recomputed in the backward; default: no limit",
    )
    bf16_weights: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description="store the weight matrices of the blocks in bfloat16 with this rounding; default: fp32 master weights",
    )
    schedule: ScheduleConfig = ScheduleConfig()
    decay_branches: list[float] = Field(
        default=[],
        description="fractions of the steps at which a step `decay_branch` may start to decay",
    )
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    deterministic: bool = Field(default=False, description="no timing affects the result")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many are kept, and a remote copy"
    )
    serial_loader: bool = Field(
        default=False, description="fill batches in the training process, for debugging"
    )

    @model_validator(mode="after")
    def _validate(self) -> PretrainConfig:
        if self.decay_branches:
            from whorl.train.lm.decay_branches import check_fractions  # imports torch

            check_fractions(self.decay_branches, self.schedule)
        return self


def _with_file_hashes(config: PretrainConfig) -> PretrainConfig:
    """Replace patterns by files and add their fingerprints, so that the address changes with the content."""
    if config.stream is None:
        return config
    sources = [replace(source, files=expand_globs(source.files)) for source in config.stream.sources]
    fingerprints = [RawFiles(source.files, source.text_field).fingerprint for source in sources]
    stream = config.stream.model_copy(update={"sources": sources, "fingerprints": fingerprints})
    return config.model_copy(update={"stream": stream})


@step(
    "model",
    config=PretrainConfig,
    complete_config=_with_file_hashes,
    not_hashed=("checkpoint_seconds", "checkpoints", "activation_budget", "serial_loader"),
    parents={"plan": "plan", "tokens": "tokens", "tokenizer": "tokenizer"},
    version=3,
)
def pretrain(ctx: StepContext, config: PretrainConfig) -> None:
    """Train the planned model."""
    from whorl.train.lm import decay_branches as branches

    job = build_job(ctx, config)
    points = {share: branches.branch_step(job, share) for share in config.decay_branches}
    train_and_save(
        ctx,
        job,
        config.checkpoints,
        checkpoint_seconds=config.checkpoint_seconds,
        branch_steps=[*points.values()],
    )
    if points:
        ctx.summary["branches"] = branches.export_branches(ctx.scratch, ctx.out, points, ctx.progress.log)


def train_and_save(
    ctx: StepContext,
    job: Job,
    checkpoints: CheckpointConfig,
    *,
    checkpoint_seconds: float,
    branch_steps: Collection[int] = (),
    start: Path | None = None,
    previous_curve: Iterable[dict[str, Any]] = (),
) -> None:
    """Train `job` and write the model, its tokenizer, its curve and a summary.

    Args:
        branch_steps, start: `branch_points` and `branch_start` of `train.lm.pretrain.pretrain`.
        previous_curve: metrics of the run that the job continues.
    """
    from whorl.models import save_model
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.train.checkpoint.manager import CheckpointStats
    from whorl.train.lm.pretrain import pretrain as run_training

    tokens = TokenSet(ctx.parents["tokens"].path)
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    started, stats = time.monotonic(), CheckpointStats()
    bytes_per_token = tokens.split("train").n_bytes / max(1, len(tokens.split("train")))
    with ctx.progress.task("Training", total=job.steps, unit="steps") as task:
        observer = PretrainObserver(ctx, job, bytes_per_token, tokenizer, task)
        model = run_training(
            job,
            ctx.scratch,
            observer,
            checkpoint_seconds=checkpoint_seconds,
            checkpoint_config=checkpoints,
            checkpoint_stats=stats,
            log=ctx.progress.log,
            branch_points=branch_steps,
            branch_start=start,
            folder=ctx.heartbeat_dir,
        )
    observer.close()
    save_model(model, ctx.out)
    tokenizer.save(ctx.out)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    (ctx.out / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
    curve = [*previous_curve, *ctx.run.read_metrics(ctx.name)]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2))
    seconds = time.monotonic() - started
    last: dict[str, float] = {}  # over all attempts of the run
    for record in curve:
        last |= {name: value for name, value in record.items() if isinstance(value, float | int)}
    speeds = sorted(record["tokens_per_second"] for record in curve if "tokens_per_second" in record)
    speed = speeds[len(speeds) // 2] if speeds else 0.0
    ctx.summary.update(
        seconds=seconds,
        steps=job.steps,
        tokens=job.steps * job.batch_size * job.seq_len,
        params=model.params(),
        peak_memory_bytes=observer.peak_memory,
        events=sum("event" in record for record in curve),
        final=last,
        tokens_per_second=speed,
        checkpoints=stats.to_json(),
        headline=(
            f"{model.params()['total'] / 1e6:.1f} M parameters; held-out {last.get('held_out_bits_per_byte', 0):.3f} "
            f"bits per byte, perplexity {last.get('held_out_perplexity', 0):.2f}; {speed:,.0f} tokens/s"
        ),
    )
    ctx.report = training_report(
        curve, ctx.summary, config=json.loads((ctx.out / "config.json").read_text()), objective="next_token",
        expected=ctx.parents["plan"].summary["expected"] if "plan" in ctx.parents else {},
    )  # fmt: skip


def build_job(ctx: StepContext, config: PretrainConfig) -> Job:
    """Return the planned job on the parents' tokens; `pretrain` trains it and `whorl profile` measures it."""
    from whorl.tokens.shards import TokenSet
    from whorl.train.job import Job

    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    planned = read_plan(ctx)["job"]
    job = Job.model_validate(
        {
            **planned,
            "tokens": str(ctx.parents["tokens"].path),
            "serial_loader": config.serial_loader,
            "stream": _stream_settings(ctx, config),
            "bf16_weights": config.bf16_weights,
            "schedule": config.schedule,
            **({"ema": config.ema} if config.ema is not None else {}),
            "spike_guard": config.spike_guard,
            "deterministic": config.deterministic or planned.get("deterministic", False),
            "activation_budget": config.activation_budget,
            **({"micro_batch_size": config.micro_batch_size} if config.micro_batch_size is not None else {}),
            **({"seed": config.seed} if config.seed is not None else {}),
        }
    )
    vocab_size = TokenSet(ctx.parents["tokens"].path).vocab_size
    if vocab_size > job.model.vocab_size:
        job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": vocab_size})})
    return job


def _stream_settings(ctx: StepContext, config: PretrainConfig) -> dict[str, object] | None:
    if config.stream is None:
        return None
    tokenizer = str(ctx.parents["tokenizer"].path)
    return {**config.stream.model_dump(mode="json", exclude={"fingerprints"}), "tokenizer": tokenizer}
