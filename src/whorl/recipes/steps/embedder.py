"""The step `embedder`: a sentence embedder from a corpus without labels.

The artifact holds the files that `embedding/embedder.py` loads (shape, weights, tokenizer), the metrics, and a page with
the learning curve. `whorl embed` computes vectors with it and finds the nearest texts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.recipes.registry import StepContext, step
from whorl.report import Curve, Facts, Line, ReportData, render
from whorl.train.checkpoint.remote import CheckpointConfig
from whorl.train.config import FiniteGuardConfig

if TYPE_CHECKING:
    from whorl.embedding.config import EmbedJob
    from whorl.models.encoder import Encoder
    from whorl.tracking.progress import ProgressTask
    from whorl.tracking.run import MetricsLog

CURVE_POINTS = 500


class EmbedderConfig(BaseModel):
    """Shape and training of the embedder; the objective is described in `embedding/train.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=8, description="length of a vector")
    n_layers: int = Field(default=1, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=64, ge=8)
    max_length: int = Field(
        default=64, ge=2, description="ids per window; longer texts are averaged over windows"
    )
    min_span: int = Field(
        default=16, ge=1, description="ids of the shortest span; documents need twice as many"
    )
    batch_size: int = Field(
        default=128, ge=2, description="documents per step; each is contrasted with all others"
    )
    steps: int = Field(default=2000, ge=1)
    temperature: float = Field(default=0.05, gt=0, description="divisor of the cosines")
    optimizer: Literal["muon", "adamw"] = Field(
        default="muon", description="for the weight matrices of the blocks"
    )
    lr_muon: float = Field(default=0.02, gt=0, description="peak learning rate under Muon")
    lr_adamw: float = Field(default=0.01, gt=0, description="peak learning rate under AdamW")
    held_out: int = Field(default=512, ge=2, description="documents among which recall is measured, at most")
    evaluations: int = Field(
        default=10, ge=1, description="evaluations on held-out documents during training"
    )
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "machine"] = Field(
        default="float32",
        description='compute type; "machine": the fastest type of the machine, worthwhile from a width of about 256',
    )
    threads: int | None = Field(
        default=None, ge=1, description="default: the fastest number for matrix products"
    )
    spike_guard: FiniteGuardConfig = Field(
        default=FiniteGuardConfig(), description="skips non-finite batches; with a threshold also outliers"
    )
    ema: float = Field(
        default=0.0, ge=0, lt=1, description="decay per step of averaged weights, which are saved; 0 for none"
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many are kept, and a remote copy"
    )

    @model_validator(mode="after")
    def _validate(self) -> EmbedderConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})")
        if self.min_span > self.max_length:
            raise ValueError(f"min_span ({self.min_span}) cannot be more than max_length ({self.max_length})")
        return self


@step(
    "embedder",
    config=EmbedderConfig,
    parents={"tokens": "tokens", "tokenizer": "tokenizer"},
    version=3,
    not_hashed=("checkpoints",),
)
def embedder(ctx: StepContext, config: EmbedderConfig) -> None:
    """Train an embedder by contrasting two spans of one document with those of others."""
    from whorl.embedding.embedder import Embedder
    from whorl.embedding.span_pairs import open_pairs
    from whorl.embedding.train import train_embedder
    from whorl.tokens.tokenizer import Tokenizer

    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    job = _build_job(ctx, config)
    pairs, held_out = open_pairs(job)
    started = time.monotonic()
    with ctx.progress.task("Training", total=job.steps, unit="steps") as task:
        observer = _EmbedderObserver(ctx, task, job.steps)
        encoder = train_embedder(
            job,
            observer,
            scratch=Path(ctx.scratch),
            checkpoint_seconds=config.checkpoint_seconds,
            heartbeat_dir=ctx.heartbeat_dir,
            checkpoint_config=config.checkpoints,
            log=ctx.progress.log,
        )
    observer.close()
    Embedder(encoder, tokenizer).save(ctx.out)
    curve = list(ctx.run.read_metrics(ctx.name))
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2, exclude={"tokens"}) + "\n")
    evaluations = [record for record in curve if "recall_at_10" in record]
    final = (
        {name: evaluations[-1][name] for name in ("recall_at_1", "recall_at_10")}
        if held_out is not None
        else {}
    )
    result = (
        f"held-out recall@1 {final['recall_at_1']:.3f}, recall@10 {final['recall_at_10']:.3f} "
        f"among {len(held_out):,} documents"
        if held_out is not None
        else "no held-out documents to measure recall on"
    )
    if held_out is not None:
        facts = [
            ("documents", f"{len(pairs):,}"),
            ("held out", f"{len(held_out):,}"),
            ("steps", f"{job.steps:,}"),
        ]
        at = [float(record["step"]) for record in evaluations]
        lines = [
            Line(name=f"recall@{k}", x=at, y=[record[f"recall_at_{k}"] for record in evaluations])
            for k in (1, 10)
        ]
        title = "Finding the other span of a document"
        ctx.report.blocks += [
            Facts(section=title, rows=[*facts, ("result", result)]),
            Curve(section=title, title="Recall among held-out documents", lines=lines, x_label="steps"),
        ]
        render(ReportData(title=title, reports=[(ctx.name, ctx.report)]), ctx.out / "curve.html")
    ctx.summary.update(
        documents=len(pairs),
        skipped=pairs.skipped,
        held_out=len(held_out) if held_out is not None else 0,
        steps=job.steps,
        seconds=time.monotonic() - started,
        final=final,
        headline=f"{result}; {pairs.skipped:,} documents too short for two spans",
    )


def _build_job(ctx: StepContext, config: EmbedderConfig) -> EmbedJob:
    from whorl.embedding.config import EmbedJob
    from whorl.models.encoder import EncoderConfig
    from whorl.tokens.shards import TokenSet

    folder = ctx.parents["tokens"].path
    shape = EncoderConfig(
        vocab_size=TokenSet(folder).vocab_size,
        d_model=config.d_model,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        mlp_hidden=config.mlp_hidden,
        max_length=config.max_length,
    )
    shapes = {
        "d_model",
        "n_layers",
        "n_heads",
        "mlp_hidden",
        "max_length",
        "checkpoint_seconds",
        "checkpoints",
        "threads",
    }
    return EmbedJob(
        tokens=str(folder),
        encoder=shape,
        threads=config.threads or ctx.machine.threads,
        device=ctx.machine.device,
        **{
            **config.model_dump(exclude=shapes),
            "dtype": config.dtype if config.dtype != "machine" else _trainable_dtype(ctx.machine.dtype),
        },
    )


def _trainable_dtype(dtype: str) -> str:
    """Return the machine's type, or the next wider one that needs no loss scaling."""
    return {"float16": "float32", "float8": "bfloat16"}.get(dtype, dtype)


class _EmbedderObserver:
    """Writes metrics and updates the progress bar after each step."""

    def __init__(self, ctx: StepContext, task: ProgressTask, steps: int) -> None:
        self.ctx, self.task, self.log_interval = ctx, task, max(1, steps // CURVE_POINTS)
        self.log: MetricsLog | None = None
        self.recall = ""

    def __call__(self, done: int, metrics: dict[str, float], _encoder: Encoder) -> None:
        if self.log is None:
            self.log = self.ctx.run.metrics(self.ctx.name, resume_at=done)
        if "recall_at_10" in metrics:
            self.recall = f", held-out recall@10 {metrics['recall_at_10']:.3f}"
        self.task.update(
            done=done,
            note=f"loss {metrics['loss']:.3f}, {metrics['pairs_per_second']:,.0f} pairs/s{self.recall}",
        )
        if done % self.log_interval == 0 or "recall_at_10" in metrics:
            self.log.write(done, metrics)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
