"""The step `embedder`: a sentence embedder from a corpus without labels.

The artifact holds the files that `embedding/embedder.py` loads (shape, weights, tokenizer), the metrics, and a page with
the learning curve. `whorl embed` computes vectors with it and finds the nearest texts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from whorl.embedding.config import EmbedConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import train_stage
from whorl.recipes.stage_recorder import Metrics, StageRecorder
from whorl.report import Curve, Facts, Line, ReportData, render
from whorl.report.stages import metric_points
from whorl.train.config import RunConfig

if TYPE_CHECKING:
    from whorl.embedding.job import EmbedJob
    from whorl.models.encoder import Encoder

CURVE_POINTS = 500


class EmbedderConfig(EmbedConfig):
    """Shape and training of the embedder."""

    d_model: int = Field(default=128, ge=8, description="length of a vector")
    n_layers: int = Field(default=1, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=64, ge=8)
    max_length: int = Field(
        default=64, ge=2, description="ids per window; longer texts are averaged over windows"
    )
    dtype: Literal["float32", "bfloat16", "machine"] = Field(
        default="float32",
        description='compute type; "machine": the fastest type of the machine, worthwhile from a width of about 256',
    )
    threads: int | None = Field(
        default=None, ge=1, description="default: the fastest number for matrix products"
    )
    run: RunConfig = Field(default=RunConfig(), description="checkpoints")

    @model_validator(mode="after")
    def _validate(self) -> EmbedderConfig:
        self.run.refuse(
            replicas="the loss compares all pairs of a batch",
            activation_budget="the encoder recomputes nothing",
        )
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
    not_hashed=("run",),
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

    def train(*, callback: Any, checkpoint_dir: Path, heartbeat_dir: Path, log: Any) -> Encoder:
        return train_embedder(
            job, callback, scratch=checkpoint_dir, checkpoint_seconds=config.run.checkpoint_seconds, log=log,
            heartbeat_dir=heartbeat_dir, checkpoint_config=config.run.checkpoints,
        )  # fmt: skip

    every = max(1, job.steps // CURVE_POINTS)
    result = train_stage(
        ctx, "Training", train, note=_progress_note, total=job.steps,
        recorder=partial(StageRecorder, log_if=lambda step, found: step % every == 0 or "recall_at_10" in found),
    )  # fmt: skip
    Embedder(result.trained, tokenizer, config.words).save(ctx.out)
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2, exclude={"tokens", "tokenizer"}) + "\n")
    final, headline = dict[str, float](), "no held-out documents to measure recall on"
    title = "Finding the other span of a document"
    if held_out is not None:
        final = {name: result.final[name] for name in ("recall_at_1", "recall_at_10")}
        headline = f"held-out recall@1 {final['recall_at_1']:.3f}, recall@10 {final['recall_at_10']:.3f} "
        headline += f"among {len(held_out):,} documents"
        facts = [
            ("documents", f"{len(pairs):,}"),
            ("held out", f"{len(held_out):,}"),
            ("steps", f"{job.steps:,}"),
            ("result", headline),
        ]
        lines = [
            Line(name=f"recall@{k}", x=[x for x, _ in points], y=[y for _, y in points])
            for k in (1, 10)
            if (points := metric_points(result.curve, f"recall_at_{k}"))
        ]
        ctx.report.blocks += [
            Facts(section=title, rows=facts),
            Curve(section=title, title="Recall among held-out documents", lines=lines, x_label="steps"),
        ]
    render(ReportData(title=title, reports=[(ctx.name, ctx.report)]), ctx.out / "curve.html")
    ctx.summary.update(
        documents=len(pairs),
        skipped=pairs.skipped,
        held_out=len(held_out) if held_out is not None else 0,
        steps=job.steps,
        seconds=result.seconds,
        final=final,
        headline=f"{headline}; {pairs.skipped:,} documents too short for two spans",
    )


def _build_job(ctx: StepContext, config: EmbedderConfig) -> EmbedJob:
    from whorl.embedding.job import EmbedJob
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
    return EmbedJob(
        tokens=str(folder),
        tokenizer=str(ctx.parents["tokenizer"].path),
        encoder=shape,
        threads=config.threads or ctx.machine.threads,
        device=ctx.machine.device,
        dtype=config.dtype if config.dtype != "machine" else _trainable_dtype(ctx.machine.dtype),
        **{name: getattr(config, name) for name in EmbedConfig.model_fields},
    )


def _trainable_dtype(dtype: str) -> Literal["float32", "bfloat16"]:
    """Return the machine's type, or the next wider one that needs no loss scaling."""
    return "bfloat16" if dtype in ("bfloat16", "float8") else "float32"


def _progress_note(metrics: Metrics) -> str:
    note = f"loss {metrics['loss']:.3f}, {metrics['pairs_per_second']:,.0f} pairs/s"
    recall = metrics.get("recall_at_10")
    return note if recall is None else f"{note}, held-out recall {recall:.3f}"
