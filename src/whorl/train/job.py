"""A job: all that decides the weights of a pretrained language model, as one frozen record.

It is what a plan ends in, what a checkpoint is compared with and what every replica is handed. Where the ids lie, how many
replicas share the work and what may be remade to save memory are in it too, but decide no weight; `identity` leaves
them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from whorl.corpus.blocks import Source
from whorl.machine.memory import MemoryText
from whorl.models import DecoderConfig, TransformerConfig
from whorl.tokens.shards import TokenSet
from whorl.tokens.stream import StreamConfig
from whorl.train.config import OptimConfig, RoutingConfig, ScheduleConfig, SpikeGuardConfig
from whorl.train.optim.stochastic_rounding import RoundingMode

NON_IDENTITY_FIELDS = {"tokens", "replicas", "threads", "device", "serial_loader", "stream", "activation_budget"}


class TextStreamConfig(BaseModel):
    """Raw files to learn from, tokenised on the way, in place of the token set's training split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokenizer: str = Field(description="folder of the tokenizer")
    sources: list[Source] = Field(min_length=1)
    shuffle_bytes: int = Field(
        default=1 << 19, ge=1, description="raw text whose documents are shuffled together"
    )
    block_bytes: int = Field(default=1 << 14, ge=1, description="raw text that is read in one piece")
    mixture_warmup_records: int = Field(
        default=1000, ge=1, description="records over which weights go to their final values"
    )
    workers: int = Field(default=1, ge=0, description="processes that tokenise, for each replica")


def _model_tag(value: Any) -> str:
    """Only a transformer names its mixers."""
    named = "mixers" in value if isinstance(value, dict) else isinstance(value, TransformerConfig)
    return "transformer" if named else "decoder"


TaggedModelConfig = Annotated[
    Annotated[DecoderConfig, Tag("decoder")] | Annotated[TransformerConfig, Tag("transformer")],
    Discriminator(_model_tag),
]


class Job(BaseModel):
    """All that decides the weights of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str = Field(description="folder of the token set")
    stream: TextStreamConfig | None = Field(default=None, description="learn from raw files instead")
    model: TaggedModelConfig
    optim: OptimConfig = OptimConfig()
    routing: RoutingConfig = RoutingConfig()
    seq_len: int = Field(ge=2, description="tokens a row")
    batch_size: int = Field(ge=1, description="rows a step, over all replicas")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows a forward, a replica; default all"
    )
    activation_budget: MemoryText | None = Field(
        default=None, description="of all replicas together; default: whatever it takes (activations.py)"
    )
    steps: int = Field(ge=1)
    seed: int = 0
    z_loss: float = Field(default=1e-5, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay a step of averaged weights; 0 keeps none")
    evaluations: int = Field(default=40, ge=1, description="looks at held-out text during the run")
    replicas: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1, description="threads a replica")
    device: str = "cpu"
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16|float16|float8)$")
    bf16_weights: RoundingMode | None = Field(
        default=None, description="of bf16 matrices; default fp32 masters"
    )
    compile: bool = True
    deterministic: bool = Field(
        default=False, description="nothing that was timed decides a bit (determinism.py)"
    )
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    serial_loader: bool = Field(default=False, description="fill batches in the training process itself")


def stream_config(job: Job, stream: TextStreamConfig) -> StreamConfig:
    """What decides the rows of a job that learns from raw text."""
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
    """What must be the same for a checkpoint to fit: the ids, but not where they lie nor how many replicas there are."""
    whole = job.model_dump(mode="json", exclude=NON_IDENTITY_FIELDS)
    if job.stream is not None:
        inside: Any = {"tokenizer": True, "workers": True, "sources": {"__all__": {"files": True}}}
        whole["stream"] = job.stream.model_dump(mode="json", exclude=inside)
    return {**whole, "data": TokenSet(Path(job.tokens)).split("train").fingerprint}
