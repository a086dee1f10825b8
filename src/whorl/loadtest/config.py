"""Settings of `whorl bench-serve`: the loads, the requests, and what is measured and written. Needs pydantic only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class LoadShape(BaseModel):
    """Settings that all loads of a test share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(
        default=100, ge=1, description="requests per load", json_schema_extra={"option": ["--requests", "-n"]}
    )
    burstiness: float = Field(
        default=1.0, gt=0, description="shape of the gamma distribution of arrival gaps; 1 is Poisson"
    )
    seed: int = Field(default=0, description="seed of arrivals, lengths and prompts")


class LoadOptions(LoadShape):
    """The loads of a test, and their prompts."""

    rate: float | None = Field(default=None, gt=0, description="requests per second (open loop)")
    rates: str | None = Field(
        default=None,
        description="several request rates, one after another",
        json_schema_extra={"metavar": "1,2,4"},
    )
    concurrency: str | None = Field(
        default=None,
        description="concurrent clients (closed loop); or several: 1,8,32",
        json_schema_extra={"metavar": "8"},
    )
    prompts: Path | None = Field(
        default=None,
        description="prompts: one per line, or JSON lines (GSM8K, ShareGPT)",
        json_schema_extra={"metavar": "FILE"},
    )
    text: Path | None = Field(
        default=None, description="text to cut prompts from", json_schema_extra={"metavar": "FILE"}
    )
    length_pairs: Path | None = Field(
        default=None,
        description="pairs of prompt and output lengths, one per line",
        json_schema_extra={"metavar": "FILE"},
    )
    input_length: str = Field(
        default="lognormal:128,0.6,2048",
        description="128, uniform:16,512 or lognormal:128,0.6,2048",
        json_schema_extra={"metavar": "LENGTHS"},
    )
    output_length: str = Field(
        default="lognormal:64,0.6,1024",
        description="output tokens, in the format of --input-length",
        json_schema_extra={"metavar": "LENGTHS"},
    )
    prefix: str | None = Field(
        default=None,
        description="shared prefixes: 512 tokens, 4 different ones",
        json_schema_extra={"metavar": "512:4"},
    )
    same_prompts: bool = Field(default=False, description="the same prompts in every load")

    @model_validator(mode="after")
    def _possible(self) -> LoadOptions:
        if self.prompts is not None and (self.text or self.length_pairs or self.prefix):
            raise ValueError(
                "--prompts excludes --text, --length-pairs and --prefix, which make synthetic prompts"
            )
        if sum(x is not None for x in (self.rate, self.rates, self.concurrency)) > 1:
            raise ValueError("several of --rate, --rates and --concurrency are given: give one of them")
        return self


class RequestOptions(BaseModel):
    """The requests of a test."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chat: bool = Field(default=False, description="use /v1/chat/completions")
    model: str | None = Field(default=None, description="default: the first model of the server")
    ignore_eos: bool = Field(default=False, description="generate up to the length limit")
    extra: str = Field(
        default="{}",
        description="additional request fields: '{\"temperature\": 0}'",
        json_schema_extra={"metavar": "JSON"},
    )
    key: str | None = Field(
        default=None, description="API key", json_schema_extra={"envvar": "WHORL_API_KEY"}
    )
    warm_up: int = Field(default=2, ge=0, description="requests before the measurement")
    timeout: float = Field(default=600.0, ge=0.001, description="timeout of a request in seconds")

    @field_validator("extra")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError('a JSON object is needed, e.g. {"temperature": 0}')
        return text

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Additional fields of every request."""
        return {**json.loads(self.extra), **({"ignore_eos": True} if self.ignore_eos else {})}


class OutputOptions(BaseModel):
    """Targets and costs that the result is compared with, and where it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slo_ttft: float | None = Field(default=None, description="target of the time to first token, in seconds")
    slo_tpot: float | None = Field(
        default=None, description="target of the time per output token, in seconds"
    )
    cost_per_hour: float | None = Field(default=None, ge=0, description="cost of the machine per hour")
    save: Path | None = Field(
        default=None, description="write every request as a JSON line", json_schema_extra={"metavar": "FILE"}
    )
    page: Path | None = Field(
        default=None,
        description="write figures and charts as one HTML file",
        json_schema_extra={"metavar": "FILE"},
    )
    as_json: bool = Field(
        default=False,
        description="print JSON lines instead of tables",
        json_schema_extra={"option": ["--json"]},
    )
