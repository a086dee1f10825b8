"""What is asked of the engine and what it answers: requests in, pieces of text as tokens out.

    engine.add(request)                    -> nothing yet; the scheduler holds it
    for delta in engine.step(): ...        every request that got further in this step, with its new tokens
    engine.abort(request.id)

Token ids in, token ids out, with the bytes that may be shown beside them: a stop text that may have begun is held back, and
a character is never cut in two by whoever shows `text` through an incremental decoder. All that a reader of tokens could
need travels with each token, under names that are not confused (`Token`).

A request is checked where it is made, field by field; whether it fits this model and this cache, the engine checks in `add`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Grammar(BaseModel):
    """What the output must be a sentence of; exactly one of the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: str | None = Field(default=None, description="a JSON schema, as JSON")
    regex: str | None = Field(
        default=None, description="of the whole output; \\d and \\w as Unicode has them"
    )
    lark: str | None = Field(default=None, description="a context-free grammar in Lark's notation")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Grammar:
        if sum(x is not None for x in (self.json_schema, self.regex, self.lark)) != 1:
            raise ValueError("give exactly one of json_schema, regex and lark")
        return self


class Request(BaseModel):
    """One sequence to be continued. Several answers to one prompt (`n`) are several requests: their prompt is shared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, description="the prompt")
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[bytes, ...] = Field(default=(), description="texts that end it, themselves left out")
    stop_ids: frozenset[int] = Field(default=frozenset(), description="ids that end it, themselves left out")
    forced_prefix: bytes = Field(default=b"", description="what the output begins with (a healed prompt)")
    grammar: Grammar | None = None
    priority: int = Field(default=0, description="lower is served first")
    top_log_probs: int = Field(default=0, ge=0, le=20, description="likeliest alternatives told a token")
    prompt_log_probs: bool = Field(default=False, description="score the prompt's own tokens too")
    client: str = Field(default="", description="whom it is for: clients are served in equal measure")
    adapter: str | None = Field(default=None, description="name of a loaded LoRA adapter")

    @model_validator(mode="after")
    def _check_stop(self) -> Request:
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty text would end every output; leave it out")
        return self


@dataclass(frozen=True)
class Token:
    """One sampled token.

    log_prob: under the distribution sampled from (temperature, penalties, cuts); raw_log_prob: under the model's own;
    alternatives: the model's likeliest ids with their raw log-probabilities; version: of the weights that it came from.
    """

    id: int
    log_prob: float
    raw_log_prob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    version: int = 0


@dataclass(frozen=True)
class Delta:
    """What one step did for one request.

    tokens: new ones, in order. text: bytes that may be shown now (held back while they may begin a stop text).
    finish: why it ended, or None. cached: positions of the prompt that were found in the cache, told with the first token.
    """

    request_id: str
    tokens: tuple[Token, ...] = ()
    text: bytes = b""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_log_probs: tuple[float, ...] = ()
