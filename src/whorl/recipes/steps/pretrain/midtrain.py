"""The step `midtrain`: a trained model continues on other text, with a learning rate that falls to zero.

With the parent `mixture` this is mid-training, the last part of pretraining, on less and better text (Hu et al. 2024,
MiniCPM, arXiv:2404.06395, section 4.2; OLMo 2, arXiv:2501.00656, section 4). The mixture decides the amount of text, so the
number of steps is train_bytes / (batch_size * seq_len * bytes per token). Its shares change over the run.

Without it the model continues on the parent `tokens`, in epochs. The text that it was trained on before is found by its
lineage. A share of the documents is drawn from it, against forgetting (Ibrahim et al. 2024, arXiv:2403.08763), and both
texts are measured before and after. A model without lineage, such as an imported one, is trained on the new text alone.

The optimizer's moments start at zero: a saved model has weights only. Its first steps are therefore warmed up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.mixture import CorpusMixture
from whorl.errors import ConfigError, NotApplicableError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import open_token_set, token_set_likelihood
from whorl.recipes.steps.pretrain.train_job import train_and_save
from whorl.recipes.steps.tokens import tokenizer_folder
from whorl.report.blocks import Change, Column, Table
from whorl.store import Artifact
from whorl.train.config import DataConfig, RunConfig, ScheduleConfig, TrainConfig

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.token_encoder import TokenEncoder

RECORDS = 1000  # draws from the mixture in a run; fewer would make its shares coarse
RECORD_BYTES = 1 << 15, 1 << 19  # at least, at most
# Positions of a row and tokens of a step, for a model that no job of this package has trained.
SEQ_LEN, STEP_TOKENS = 512, 8192


class MidtrainDataConfig(DataConfig):
    """Rows of a step; their number of steps is the mixture's."""

    seq_len: int | None = Field(  # type: ignore[assignment]
        default=None,
        ge=8,
        description="positions of a row; default: pretraining's, with a mixture twice as many",
    )
    batch_size: int | None = Field(  # type: ignore[assignment]
        default=None, ge=1, description="rows per step; default: as many tokens as in pretraining"
    )
    epochs: float = Field(default=1.0, gt=0, description="passes over the text, without a mixture")
    replay_fraction: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="share of the training tokens from the text that the model was trained on, without a mixture",
    )


class MidtrainTrainConfig(TrainConfig):
    """The update loop; the learning rate falls to zero."""

    schedule: ScheduleConfig = ScheduleConfig(kind="linear", warmup_ratio=0.05, min_lr_ratio=0.0)


class MidtrainConfig(BaseModel):
    """Length of rows and learning rate; text and number of steps are the mixture's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr_scale: float = Field(
        default=0.3, gt=0, description="peak learning rates as a multiple of pretraining's"
    )
    seed: int = Field(default=0, ge=0)
    data: MidtrainDataConfig = Field(default=MidtrainDataConfig(), description="rows of text")
    train: MidtrainTrainConfig = Field(default=MidtrainTrainConfig(), description="the update loop")
    run: RunConfig = Field(default=RunConfig(), description="checkpoints")

    @model_validator(mode="after")
    def _validate(self) -> MidtrainConfig:
        self.run.refuse(
            **dict.fromkeys(("activation_budget", "replicas"), "one replica trains, without a budget")
        )
        return self


@step(
    "model",
    config=MidtrainConfig,
    not_hashed=("run",),
    parents={"model": "model", "mixture?": "mixture", "tokens": "tokens", "tokenizer?": "tokenizer"},
    version=2,
)
def midtrain(ctx: StepContext, config: MidtrainConfig) -> None:
    """Continue pretraining on other text, with an annealed learning rate."""
    from whorl.models import load_model
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.train.job import Job

    folder, tokens = ctx.parent_folder("model"), open_token_set(ctx)
    mixture = CorpusMixture.load(ctx.parent_folder("mixture")) if "mixture" in ctx.parents else None
    model, before = load_model(folder), job_before(ctx, folder)
    seq_len = config.data.seq_len or (2 if mixture else 1) * before["seq_len"]
    if seq_len > model.eval_window:
        raise ConfigError(
            f"rows of {seq_len} positions", expected=f"at most {model.eval_window}, which the model can read"
        )
    batch_size = config.data.batch_size or max(1, before["batch_size"] * before["seq_len"] // seq_len)
    measured, old = dict[str, TokenSet](), None
    if mixture is None:
        old = old_tokens(ctx)
        measured = {"new": tokens} | ({"old": old} if old is not None else {})
        tokens = with_replay(ctx, tokens, old, config)
    split = tokens.split("train")
    n_tokens = config.data.epochs * len(split)
    if mixture is not None:
        n_tokens = mixture.train_bytes * len(split) / max(1, split.n_bytes)
    if not len(split):
        raise NotApplicableError("the new text has no training split", do="give more text")
    batch_size = max(1, min(batch_size, len(split) // seq_len))  # of a small text
    job = Job.model_validate(
        {
            **before,
            **dict(config.train),
            "tokens": str(tokens.folder),
            "stream": stream_settings(ctx, mixture) if mixture else None,
            "model": model.config,
            "optim": _scaled(before["optim"], config.lr_scale),
            "seq_len": seq_len,
            "long_ratio": 0.0,
            "batch_size": batch_size,
            "steps": max(1, round(n_tokens / (batch_size * seq_len))),
            "seconds": None,
            "seed": config.seed,
            "replicas": 1,
            "deterministic": config.train.deterministic or before["deterministic"],
            "evaluations": min(before["evaluations"], 10),
        }
    )
    encoder = TokenEncoder.load(tokenizer_folder(ctx))
    losses = {"before": bits_of(measured, model, encoder)}
    trained = train_and_save(ctx, job, config.run, start=folder)
    losses["after"] = bits_of(measured, trained, encoder)
    if mixture is not None:
        ctx.summary["mixture"] = mixture.digest
        return
    ctx.summary["bits_per_byte_of"] = losses
    rows = [
        (name, Change(before=f"{bits:.3f}", after=f"{losses['after'][name]:.3f}"))
        for name, bits in losses["before"].items()
    ]
    if rows:
        note = "Bits per byte of the start of each test split. A rise for the old text means forgetting."
        columns = [Column(name="Text"), Column(name="Bits per byte", number=True)]
        ctx.report.blocks.append(
            Table(
                title="New and old text", note=note, columns=columns, rows=[[f"{n} text", c] for n, c in rows]
            )
        )
        texts = [f"{name} text {c.before} before, {c.after} after" for name, c in rows]
        ctx.summary["headline"] = f"bits per byte: {', '.join(texts)}; {ctx.summary['headline']}"


def job_before(ctx: StepContext, folder: Path) -> dict[str, Any]:
    """Return the fields of the job that trained a model; of one that no job of this package trained, usual ones."""
    from whorl.models.serialization import read_config
    from whorl.train.job import Job, read_job

    if (folder / "job.json").is_file():
        return {"deterministic": False, **read_job(folder)}
    machine, model = ctx.machine, read_config(folder)
    ctx.machine.apply()
    seq_len = min(SEQ_LEN, model.max_length)
    job = Job(
        tokens="", model=model, seq_len=seq_len, batch_size=max(1, STEP_TOKENS // seq_len), steps=1,
        dtype=machine.dtype, threads=machine.threads, device=machine.device,
    )  # fmt: skip
    return job.model_dump()


def old_tokens(ctx: StepContext) -> TokenSet | None:
    """Return the token set that the parent `model`, or a model before it, was trained on; None if the store has none."""
    from whorl.tokens.shards import TokenSet

    model: Artifact | None = ctx.parents["model"]
    while model is not None:
        tokens = ctx.store.find(model.parents.get("tokens", ""))
        if tokens is not None and tokens.address != ctx.parents["tokens"].address:
            tokens.check()
            return TokenSet(tokens.path)
        model = ctx.store.find(model.parents.get("model", ""))
    ctx.progress.log(
        "    the store has no text that the model was trained on before: no share of it is trained again"
    )
    return None


def with_replay(ctx: StepContext, new: TokenSet, old: TokenSet | None, config: MidtrainConfig) -> TokenSet:
    """Return a token set with the new documents and old ones, drawn by the seed, up to `config.data.replay_fraction`."""
    from whorl.tokens.shards import ShardWriter, TokensConfig, TokenSet
    from whorl.tracking.seeds import numpy_rng

    if old is None or not config.data.replay_fraction:
        return new
    out, wanted = ctx.scratch / "tokens", config.data.replay_fraction / (1 - config.data.replay_fraction)
    out.mkdir(parents=True, exist_ok=True)
    train, source = new.split("train"), old.split("train")
    order = numpy_rng(config.seed, "replay").permutation(source.n_documents)
    order = order[: 1 + int(np.searchsorted(source.lengths[order].cumsum(), wanted * len(train)))]
    drawn = int(source.lengths[order].sum())
    parts = {"train": [(train, np.arange(train.n_documents)), (source, order)]}
    if "validation" in new.splits:
        held_out = new.split("validation")
        parts["validation"] = [(held_out, np.arange(held_out.n_documents))]
    for part, found in parts.items():
        with ShardWriter(out, part, new, TokensConfig().shard_tokens) as writer:
            for split, numbers in found:
                for number, row in zip(numbers, split.documents.take(numbers).to_pylist(), strict=True):
                    origin = [row[name] for name in ("bytes", "id", "source", "path", "offset")]
                    writer.add(split.document(int(number))[1:-1], *origin)
            writer.finish()
    share = drawn / (drawn + len(train))
    ctx.progress.log(f"    {drawn:,} tokens of old text, {share:.0%} of all, against forgetting")
    return TokenSet(out)


def bits_of(sets: dict[str, TokenSet], model: LanguageModel, encoder: TokenEncoder) -> dict[str, float]:
    """Return the bits per byte of the start of each test split, by name; of those that have one."""
    found = {name: token_set_likelihood(tokens, model, encoder) for name, tokens in sets.items()}
    return {name: one.bits_per_byte for name, one in found.items() if one is not None}


def stream_settings(ctx: StepContext, mixture: CorpusMixture) -> dict[str, Any]:
    """Return a job's `stream` that reads the parent `mixture`."""
    record = min(max(mixture.train_bytes // RECORDS, RECORD_BYTES[0]), RECORD_BYTES[1])
    sources = mixture.sources(ctx.parents["mixture"].path)
    return {
        "tokenizer": str(ctx.parents["tokenizer"].path),
        "sources": sources,
        "shuffle_bytes": record,
        "mixture_warmup_records": max(1, round(mixture.change_until * mixture.train_bytes / record)),
    }


def _scaled(optim: dict[str, Any], factor: float) -> dict[str, Any]:
    return {name: value * factor if name.startswith("lr_") else value for name, value in optim.items()}
