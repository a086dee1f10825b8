"""A sentence embedder from a corpus without labels: the step `embedder`.

The artifact is what `embedding/embedder.py` loads (shape, weights, tokenizer), with the curve beside it and a page that draws it.
`whorl embed` turns texts into vectors with it, and finds the nearest.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.recipes.registry import StepContext, step

if TYPE_CHECKING:
    from whorl.embedding.train import EmbedJob
    from whorl.models.encoder import Encoder
    from whorl.tracking.progress import ProgressTask
    from whorl.tracking.run import MetricsLog

CURVE_POINTS = 500


class EmbedderConfig(BaseModel):
    """The shape of the embedder and how it learns; `embedding/train.py` says what from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=8, description="length of a vector")
    n_layers: int = Field(default=1, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=64, ge=8)
    max_length: int = Field(
        default=64, ge=2, description="ids seen together; longer texts are averaged over windows"
    )
    min_span: int = Field(
        default=16, ge=1, description="ids of the shortest span; documents need twice as many"
    )
    batch_size: int = Field(default=128, ge=2, description="documents a step, each against all the others")
    steps: int = Field(default=2000, ge=1)
    temperature: float = Field(default=0.05, gt=0, description="what cosines are divided by")
    optimizer: Literal["muon", "adamw"] = Field(default="muon", description="for the matrices of the blocks")
    lr_muon: float = Field(default=0.02, gt=0, description="peak learning rate under Muon")
    lr_adamw: float = Field(default=0.01, gt=0, description="peak learning rate under AdamW")
    held_out: int = Field(default=512, ge=2, description="documents among which recall is measured, at most")
    evaluations: int = Field(default=10, ge=1, description="looks at held-out documents during the run")
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "machine"] = Field(
        default="float32",
        description='of products; "machine": what it multiplies fastest, which pays from a width of 256 or so',
    )
    threads: int | None = Field(
        default=None, ge=1, description="left alone, as many as this machine multiplies fastest with"
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")

    @model_validator(mode="after")
    def _possible(self) -> EmbedderConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})")
        if self.min_span > self.max_length:
            raise ValueError(f"min_span ({self.min_span}) cannot be more than max_length ({self.max_length})")
        return self


@step("embedder", config=EmbedderConfig, parents={"tokens": "tokens", "tokenizer": "tokenizer"}, version=2)
def embedder(ctx: StepContext, config: EmbedderConfig) -> None:
    """Train an embedder: two spans of one document belong together."""
    from whorl.embedding.embedder import Embedder
    from whorl.embedding.train import open_pairs, train_embedder
    from whorl.report.charts import Series
    from whorl.report.curve import write_curve_page
    from whorl.tokens.tokenizer import Tokenizer

    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    job = _build_job(ctx, config)
    pairs, held = open_pairs(job)
    began = time.monotonic()
    with ctx.progress.task("Training", total=job.steps, unit="steps") as task:
        watch = _EmbedderObserver(ctx, task, job.steps)
        encoder = train_embedder(
            job,
            watch,
            scratch=Path(ctx.scratch),
            checkpoint_seconds=config.checkpoint_seconds,
            log=ctx.progress.log,
        )
    watch.close()
    Embedder(encoder, tokenizer).save(ctx.out)
    curve = list(ctx.run.read_metrics(ctx.name))
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2, exclude={"tokens"}) + "\n")
    looks = [record for record in curve if "recall_at_10" in record]
    final = {name: looks[-1][name] for name in ("recall_at_1", "recall_at_10")} if held is not None else {}
    told = (
        f"held-out recall@1 {final['recall_at_1']:.3f}, recall@10 {final['recall_at_10']:.3f} among {len(held):,} documents"
        if held is not None
        else "no held-out documents to measure recall on"
    )
    if held is not None:
        facts = [
            ("documents", f"{len(pairs):,}"),
            ("held out", f"{len(held):,}"),
            ("steps", f"{job.steps:,}"),
        ]
        at = [float(record["step"]) for record in looks]
        curves = [Series(f"recall@{k}", at, [record[f"recall_at_{k}"] for record in looks]) for k in (1, 10)]
        write_curve_page(
            ctx.out / "curve.html", "Finding the other span of a document", [*facts, ("result", told)], curves,
            y="Recall among held-out documents", x="steps",
        )  # fmt: skip
    ctx.summary.update(
        documents=len(pairs),
        skipped=pairs.skipped,
        held_out=len(held) if held is not None else 0,
        steps=job.steps,
        seconds=time.monotonic() - began,
        final=final,
        headline=f"{told}; {pairs.skipped:,} documents too short for two spans",
    )


def _build_job(ctx: StepContext, config: EmbedderConfig) -> EmbedJob:
    from whorl.embedding.train import EmbedJob
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
    shapes = {"d_model", "n_layers", "n_heads", "mlp_hidden", "max_length", "checkpoint_seconds", "threads"}
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
    """The machine's type, or the next wider one where its training would need what an embedder's has not (a loss scale)."""
    return {"float16": "float32", "float8": "bfloat16"}.get(dtype, dtype)


class _EmbedderObserver:
    """Called after each step: shows and keeps how far training is."""

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
