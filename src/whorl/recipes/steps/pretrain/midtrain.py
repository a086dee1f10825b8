"""The step `midtrain`: a trained model continues on a mixture, with longer rows and a learning rate that falls to zero.

Mid-training is the last part of pretraining, on less and better text (Hu et al. 2024, MiniCPM, arXiv:2404.06395, section
4.2; OLMo 2, arXiv:2501.00656, section 4). The mixture decides the amount of text, so the number of steps is
train_bytes / (batch_size * seq_len * bytes per token). Its shares change over the run.

The optimizer's moments start at zero: a saved model has weights only. Its first steps are therefore warmed up.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.mixture import CorpusMixture
from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.pretrain.train_job import train_and_save
from whorl.train.config import DataConfig, RunConfig, ScheduleConfig, TrainConfig

RECORDS = 1000  # draws from the mixture in a run; fewer would make its shares coarse
RECORD_BYTES = 1 << 15, 1 << 19  # at least, at most


class MidtrainDataConfig(DataConfig):
    """Rows of a step; their number of steps is the mixture's."""

    seq_len: int | None = Field(  # type: ignore[assignment]
        default=None, ge=8, description="positions of a row; default: twice pretraining's"
    )
    batch_size: int | None = Field(  # type: ignore[assignment]
        default=None, ge=1, description="rows per step; default: as many tokens as in pretraining"
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
    parents={"model": "model", "mixture": "mixture", "tokens": "tokens", "tokenizer": "tokenizer"},
)
def midtrain(ctx: StepContext, config: MidtrainConfig) -> None:
    """Continue pretraining on a mixture, with longer rows and an annealed learning rate."""
    from whorl.models import load_model
    from whorl.tokens.shards import TokenSet
    from whorl.train.job import Job, read_job

    folder, mixture_folder = ctx.parent_folder("model"), ctx.parent_folder("mixture")
    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    if not (folder / "job.json").is_file():
        raise ConfigError(
            f"{ctx.parents['model'].name} is no pretrained model of this package",
            expected="a model of the step `pretrain`, `decay_branch` or `midtrain`",
        )
    mixture = CorpusMixture.load(mixture_folder)
    before = read_job(folder)
    split = TokenSet(ctx.parents["tokens"].path).split("train")
    seq_len = config.data.seq_len or 2 * before["seq_len"]
    longest = load_model(folder).eval_window
    if seq_len > longest:
        raise ConfigError(
            f"rows of {seq_len} positions", expected=f"at most {longest}, which the model can read"
        )
    batch_size = config.data.batch_size or max(1, before["batch_size"] * before["seq_len"] // seq_len)
    bytes_per_token = split.n_bytes / max(1, len(split))
    steps = max(1, round(mixture.train_bytes / (batch_size * seq_len * bytes_per_token)))
    job = Job.model_validate(
        {
            **before,
            **dict(config.train),
            "tokens": str(ctx.parents["tokens"].path),
            "stream": stream_settings(ctx, mixture),
            "optim": _scaled(before["optim"], config.lr_scale),
            "seq_len": seq_len,
            "long_ratio": 0.0,
            "batch_size": batch_size,
            "steps": steps,
            "seed": config.seed,
            "replicas": 1,
            "deterministic": config.train.deterministic or before["deterministic"],
            "evaluations": min(before["evaluations"], 10),
        }
    )
    train_and_save(ctx, job, config.run, start=folder)
    ctx.summary["mixture"] = mixture.digest


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
