"""Settings of a server: addresses, limits, service-level objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGE_BODY_BYTES = 1 << 13  # larger request bodies are processed outside of the event loop


class ServeConfig(BaseModel):
    """Settings of the server. The engine has a separate `EngineConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; other than this machine's, it requires keys",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port; 0 selects a free one")
    key_file: Path | None = Field(
        default=None,
        description="require the keys of this file, made by `whorl keys add`",
        json_schema_extra={"option": ["--api-key-file"], "metavar": "FILE"},
    )
    slo_ttft: float = Field(
        default=0.5, gt=0, description="target of the time to first token in seconds, for /metrics"
    )
    slo_tpot: float = Field(default=0.1, gt=0, description="target of the time per output token in seconds")
    max_queue: int = Field(
        default=512, ge=1, description="maximum number of waiting requests; further ones get status 503"
    )
    max_choices: int = Field(default=128, ge=1, description="sequences per request")
    max_body: int = Field(default=4 << 20, ge=1024, description="bytes of a request body")
    body_seconds: float = Field(
        default=30.0, gt=0, description="seconds within which a request body must arrive"
    )
    stall_seconds: float = Field(
        default=60.0, gt=0, description="seconds after which a reader that receives no data is dropped"
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        description="seconds to finish running requests on shutdown",
        json_schema_extra={"option": ["--drain"]},
    )
    search: str | None = Field(
        default=None, description="answer with sources of a search index, made by `whorl watch`",
        json_schema_extra={"metavar": "NAME"},
    )  # fmt: skip
    source_tokens: int = Field(default=1024, ge=16, description="tokens of the sources in a prompt, at most")


class ServedModelConfig(BaseModel):
    """The served models, and how they are loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(
        default=None, description="name of the model in the API; default: that of the artifact"
    )
    adapter: list[str] = Field(
        default=[],
        description="a LoRA adapter of the model, served under its own name or NAME; may be repeated",
        json_schema_extra={"metavar": "[NAME=]ARTIFACT|FOLDER"},
    )
    chat_template: Path | None = Field(
        default=None,
        description="a chat template in Jinja, in place of the model's",
        json_schema_extra={"metavar": "FILE"},
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        le=1 << 24,
        description="maximum tokens of prompt and output; default: what the model declares",
    )
    kv_cache_memory: float | None = Field(
        default=None,
        ge=0.001,
        description="memory of the KV caches of all models together; default: a quarter of the free memory",
        json_schema_extra={"metavar": "GB"},
    )
    prompt_lookup: bool = Field(
        default=False,
        description="speculative decoding with n-grams of the context; does not change the output",
        json_schema_extra={"option": ["--prompt-lookup/--no-prompt-lookup"]},
    )
    draft: str | None = Field(
        default=None,
        description="speculative decoding with a draft model: artifact or folder, with the model's tokenizer",
        json_schema_extra={"metavar": "MODEL"},
    )
    multi_token: bool = Field(
        default=False, description="speculative decoding with the model's multi-token heads"
    )
    max_drafts: int | None = Field(
        default=None,
        ge=1,
        description="draft tokens per step; default: 8 by n-grams, 4 by a draft model, all heads",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="type of the computation; default: the faster one"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: the fastest number")


class EventLogConfig(BaseModel):
    """The event log of a server (docs/loop.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log: bool = Field(default=False, description="log completions of users who consent, and feedback on them")
    challenger: str | None = Field(
        default=None,
        description="a second model with the same tokenizer that answers a share of the actors, under the name of the first",
        json_schema_extra={"metavar": "MODEL"},
    )
    traffic: float = Field(default=0.2, ge=0, le=1, description="share of the challenger")
    compare: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the prompts on the chat page that get two answers to choose from",
    )
    log_url: str | None = Field(
        default=None,
        description="where; default: the variable WHORL_LOG, else a SQLite file of the store",
        json_schema_extra={"metavar": "URL"},
    )

    views: str | None = Field(
        default=None,
        description="the views of `whorl loop --views`; default: a SQLite file of the store",
        json_schema_extra={"metavar": "URL"},
    )
    count_cache: str = Field(
        default="",
        description="the cache of `whorl loop --cache`, redis://HOST; default: in this process",
        json_schema_extra={"metavar": "URL"},
    )

    @model_validator(mode="after")
    def _check_log(self) -> EventLogConfig:
        if (self.challenger or self.compare) and not self.logs:
            raise ValueError("--challenger and --compare need --log, where the votes go")
        return self

    @property
    def logs(self) -> bool:
        return self.log or self.log_url is not None


class ServerProcessesConfig(BaseModel):
    """The processes of a server, and their keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    no_auth: bool = Field(default=False, description="no keys, even on a public address")
    replicas: int = Field(
        default=1, ge=1, description="server processes with separate cores behind one router"
    )
    prefill: int = Field(
        default=0, ge=0, description="processes that compute prompts only; with it, --decode is at least 1"
    )
    decode: int = Field(
        default=0, ge=0, description="processes that generate only; with it, --prefill is at least 1"
    )
    manifest: str | None = Field(
        default=None,
        description="print the manifest for kubernetes or ray and exit",
        json_schema_extra={"metavar": "KIND"},
    )
