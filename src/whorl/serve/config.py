"""Settings of a server: addresses, limits, service-level objectives."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ServeConfig(BaseModel):
    """Settings of the server. The engine has a separate `EngineConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 selects a free port")
    key_file: Path | None = Field(
        default=None, description="written by `whorl keys add`; without it no key is required"
    )
    slo_ttft: float = Field(default=0.5, gt=0, description="SLO: seconds to the first token")
    slo_tpot: float = Field(default=0.1, gt=0, description="SLO: seconds per token after the first")
    max_queue: int = Field(default=512, ge=1, description="sequences that wait for their first token")
    max_choices: int = Field(default=128, ge=1, description="sequences per request")
    max_body: int = Field(default=4 << 20, ge=1024, description="bytes of a request body")
    body_seconds: float = Field(
        default=30.0, gt=0, description="seconds within which a request body must arrive"
    )
    stall_seconds: float = Field(
        default=60.0, gt=0, description="seconds after which a reader that receives no data is dropped"
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="seconds for running sequences after SIGTERM"
    )
