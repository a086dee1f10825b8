"""What a server can be told, beside the model: addresses, limits, promises."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ServeConfig(BaseModel):
    """The server's settings; those of the engine are the engine's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes a free one")
    key_file: Path | None = Field(
        default=None, description="as `whorl keys` writes it; without it anybody may ask"
    )
    slo_ttft: float = Field(default=0.5, gt=0, description="promised seconds to the first token")
    slo_tpot: float = Field(default=0.1, gt=0, description="promised seconds a token after the first")
    max_queue: int = Field(default=512, ge=1, description="sequences that may wait for their first token")
    max_choices: int = Field(default=128, ge=1, description="sequences that one request may ask for")
    max_body: int = Field(default=4 << 20, ge=1024, description="bytes of a request")
    body_seconds: float = Field(default=30.0, gt=0, description="within which a request must have arrived")
    stall_seconds: float = Field(
        default=60.0, gt=0, description="after which a reader who takes nothing is let go"
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="given to what runs when the server is told to stop"
    )
