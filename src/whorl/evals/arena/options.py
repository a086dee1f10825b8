"""Settings of battles and of the answers in them, which are options of `whorl arena`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from whorl.evals.model.options import DEFAULT_TIMEOUT, Dtype

Sampling = Literal["uniform", "information"]


class BattleConfig(BaseModel):
    """Models that load, pairs that are drawn, and the log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    votes: Path = Field(
        default=Path("arena.sqlite"), description="log of battles and votes; it is continued",
        json_schema_extra={"metavar": "FILE"},
    )  # fmt: skip
    field: str = Field(default="prompt", description="field of the prompts in records")
    sampling: Sampling = Field(
        default="uniform", description="pairs: uniform, or those of the largest uncertainty"
    )
    seed: int | None = Field(
        default=None, ge=0, description="seed of pairs, sides and samples; default: a random one"
    )
    dtype: Dtype = Field(default="float32", description="type of the weights")
    timeout: float = Field(
        default=DEFAULT_TIMEOUT,
        gt=0,
        allow_inf_nan=False,
        description="with a URL: seconds without a byte before an attempt is given up. It is retried 4 times",
    )


class AnswerSettings(BaseModel):
    """How models answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=512, ge=1, description="tokens of an answer at most")
    temperature: float = Field(default=0.7, ge=0, description="temperature of the answers")
    top_p: float = Field(default=1.0, description="nucleus of the answers")
    system: str = Field(default="", description="system message of every conversation")
    complete: bool = Field(
        default=False, description="prompts are texts to continue, without a chat template"
    )
    stop: tuple[str, ...] = Field(default=(), description="texts that end an answer")
