"""A job: everything that decides the weights of a pretrained language model, as one frozen record.

It is the result of a plan (`plan/training_plan.py`), the identity of a checkpoint and the argument of every replica.
It also holds fields that decide no weight: paths, the number of replicas, activation checkpointing. `identity` leaves
these out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from whorl.errors import settings_error
from whorl.machine.memory import MemoryText
from whorl.models import TransformerConfig
from whorl.models.transformer_block import YARN_FACTOR
from whorl.parallel.process_group import launched_ranks
from whorl.registry import check_permitted, code_named_in, permit_code
from whorl.tokens.shards import TokenSet
from whorl.tokens.stream import StreamConfig
from whorl.train.config import (
    MASKED,
    OptimConfig,
    PretrainObjectiveName,
    RoutingConfig,
    ScheduleConfig,
    SpikeGuardConfig,
)
from whorl.train.optim.stochastic_rounding import RoundingMode
from whorl.train.stream_config import TextStreamConfig

LONG_FACTOR = int(YARN_FACTOR)  # of the rows at the end of a run: the model's evaluation window
NON_IDENTITY_FIELDS = {
    "tokens",
    "replicas",
    "layout",
    "threads",
    "device",
    "serial_loader",
    "stream",
    "activation_budget",
    "seconds",
}


class JobStreamConfig(TextStreamConfig):
    """The raw text of a job, with the tokenizer that encodes it."""

    tokenizer: str = Field(description="folder of the tokenizer")


class Job(BaseModel):
    """The settings of one pretraining run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str = Field(description="folder of the token set")
    stream: JobStreamConfig | None = Field(default=None, description="train on raw files instead")
    model: TransformerConfig
    optim: OptimConfig = OptimConfig()
    routing: RoutingConfig = RoutingConfig()
    seq_len: int = Field(ge=2, description="tokens per row")
    batch_size: int = Field(ge=1, description="rows per step, over all replicas")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows per forward pass and replica; default: all"
    )
    activation_budget: MemoryText | None = Field(
        default=None, description="of all replicas together; default: unlimited (resilience/memory_budget.py)"
    )
    steps: int = Field(ge=1)
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="planned for training; a slower run is shortened (resilience/deadline.py)",
    )
    long_ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="fraction of the steps, at the end, with rows of LONG_FACTOR times the length",
    )
    seed: int = 0
    objective: PretrainObjectiveName = "next_token"
    z_loss: float = Field(default=1e-5, ge=0, description="of next_token")
    schedule: ScheduleConfig = ScheduleConfig()
    ema: float = Field(
        default=0.0, ge=0, lt=1, description="decay per step of the averaged weights; 0: no average"
    )
    evaluations: int = Field(default=40, ge=1, description="validations during the run")
    replicas: int = Field(default=1, ge=1)
    layout: str | None = Field(
        default=None, description="of the ranks (parallel/layout.py); replicas share the rows"
    )
    threads: int = Field(default=1, ge=1, description="threads per replica")
    device: str = "cpu"
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16|float16|float8)$")
    bf16_weights: RoundingMode | None = Field(
        default=None, description="rounding of weights stored in bf16; default: fp32 master weights"
    )
    compile: bool = True
    compile_long: bool = Field(default=False, description="with `compile`: the steps with long rows, too")
    deterministic: bool = Field(default=False, description="no timing decides a bit (determinism.py)")
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    serial_loader: bool = Field(default=False, description="fill batches in the training process itself")

    @model_validator(mode="after")
    def _validate(self) -> Job:
        if self.long_ratio and (self.model.trained_length != self.seq_len or self.stream is not None):
            raise ValueError(
                "long_ratio needs a model with trained_length = seq_len, whose rotary tables reach further, and a token set"
            )
        if self.long_ratio and self.batch_size % (LONG_FACTOR * self.replicas):
            raise ValueError(
                f"long_ratio needs a batch_size, {self.batch_size}, that {LONG_FACTOR} x replicas ({self.replicas}) divides"
            )
        if (self.objective == MASKED) != (self.model.masked is not None):
            raise ValueError(
                f"objective ({self.objective!r}) and model.masked ({self.model.masked}): give both or none of them"
            )
        return self


def stream_config(job: Job, stream: JobStreamConfig) -> StreamConfig:
    """The stream settings of a job that trains on raw text."""
    return StreamConfig(
        Path(stream.tokenizer),
        stream.sources,
        job.seq_len,
        job.seed,
        shuffle_bytes=stream.shuffle_bytes,
        block_bytes=stream.block_bytes,
        mixture_warmup_records=stream.mixture_warmup_records,
    )


def identity(job: Job) -> dict[str, Any]:
    """The fields that must be equal for a checkpoint to fit: the data, but neither its path nor the number of replicas."""
    whole = job.model_dump(mode="json", exclude=NON_IDENTITY_FIELDS)
    if job.stream is not None:
        inside: Any = {"tokenizer": True, "workers": True, "sources": {"__all__": {"files": True}}}
        whole["stream"] = job.stream.model_dump(mode="json", exclude=inside)
    return {**whole, "data": TokenSet(Path(job.tokens)).split("train").fingerprint}


def on_world(job: Job) -> Job:
    """Return the job on all ranks of a launcher (`parallel/launch`), for any number of replicas in its plan."""
    ranks = launched_ranks()
    return job.model_copy(update={"replicas": ranks}) if ranks and job.layout is None else job


def job_of_program(settings: Mapping[str, Any]) -> Job:
    """Return the job of a Python program, and permit the code that its settings name (`whorl.registry`).

    Raises:
        ConfigError: a setting does not exist or is wrong.
    """
    try:
        job = Job.model_validate(settings)
    except ValidationError as error:
        do = "see whorl.train.job.Job for the fields"
        raise settings_error(error.errors()[0], "the job", Job, do) from error
    permit_code(*code_named_in(job.model_dump()))
    return job


def read_job(folder: Path) -> dict[str, Any]:
    """Return the fields of the job that trained the model in a folder.

    Raises:
        ConfigError: they name code that neither a recipe nor a command line permits. That of mixers is checked later.
    """
    path = folder / "job.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    check_code_of_job(fields.get("objective", ""), fields["optim"]["optimizer"], path)
    return fields


def check_code_of_job(objective: str, optimizer: str, path: Path) -> None:
    """Check that a file with a job, which another may have made, names no code that is not permitted.

    Raises:
        ConfigError: it does.
    """
    for name in (objective, optimizer):
        if ":" in name:
            check_permitted(name, str(path))


@dataclass(frozen=True)
class RowShape:
    """The rows of a step."""

    seq_len: int
    batch_size: int


def first_long_step(job: Job) -> int:
    """Return the number of the first step with long rows; `job.steps` without any."""
    return min(job.steps, round(job.steps * (1 - job.long_ratio)))


def row_shape(job: Job, step: float) -> RowShape:
    """Return the rows of planned step `step` (from 0): at the end of the run longer and fewer, with as many tokens."""
    n = LONG_FACTOR if job.long_ratio and step >= first_long_step(job) else 1
    return RowShape(job.seq_len * n, job.batch_size // n)


def last_rows(job: Job) -> RowShape:
    """Return the rows of the last step: the longest of the run."""
    return row_shape(job, job.steps)


def steps_per_epoch(job: Job) -> float:
    """The steps after which text is read a second time; infinite for raw text, whose size is not counted."""
    if job.stream is not None:
        return math.inf
    return len(TokenSet(Path(job.tokens)).split("train")) / (job.batch_size * job.seq_len)
