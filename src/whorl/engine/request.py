"""Requests to the engine and the tokens it returns.

    engine.add(request)                    -> the scheduler queues it
    for delta in engine.step(): ...        one Delta per request that advanced, with its new tokens
    engine.abort(request.id)

A request either samples tokens or, with `score_from`, scores a continuation that is part of its ids. Scoring computes the
positions from the cached prefix on, logits only where an id is scored, and samples nothing.

Token ids in, token ids out. `Delta.text` has the bytes that may be shown: a possible start of a stop string is held back.
Text may end inside a character; decode it with an incremental decoder.

A request validates its own fields. `Engine.add` checks it against the model and the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
Alternatives = tuple[tuple[int, float], ...]  # ids with their log-probabilities, the most likely first


class Grammar(BaseModel):
    """A constraint on the whole output; exactly one field is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: str | None = Field(default=None, description="a JSON schema, as JSON")
    regex: str | None = Field(
        default=None, description="regular expression for the whole output; \\d and \\w follow Unicode"
    )
    lark: str | None = Field(default=None, description="a context-free grammar in Lark's notation")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Grammar:
        if sum(x is not None for x in (self.json_schema, self.regex, self.lark)) != 1:
            raise ValueError("give exactly one of json_schema, regex and lark")
        return self


class Request(BaseModel):
    """One sequence to continue. Several completions of one prompt (`n`) are several requests that share cached pages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, description="the prompt")
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = Field(default=256, ge=1)
    min_tokens: int = Field(
        default=0, ge=0, description="no stop id is sampled and no stop string looked for before so many tokens"
    )  # fmt: skip
    stop: tuple[bytes, ...] = Field(default=(), description="stop strings, excluded from the text")
    stop_ids: frozenset[int] = Field(default=frozenset(), description="stop ids, excluded from the text")
    forced_prefix: bytes = Field(
        default=b"",
        description="bytes that the output starts with (a healed prompt); not part of the text and not counted",
    )
    grammar: Grammar | None = None
    priority: int = Field(default=0, description="lower is scheduled first")
    top_log_probs: int = Field(default=0, ge=0, le=20, description="alternatives returned per token")
    prompt_log_probs: bool = Field(
        default=False,
        description="return log-probabilities of the prompt's tokens from the second on, then sample",
    )
    score_from: int | None = Field(
        default=None,
        ge=1,
        description="return log-probabilities of ids[score_from:], and sample nothing; earlier ids may come from the cache",
    )
    suffix: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="masked diffusion without blocks: the text behind a gap of max_tokens ids"
    )
    client: str = Field(default="", description="client id; clients get equal shares of the engine")
    adapter: str | None = Field(default=None, description="name of a loaded LoRA adapter")
    model: str = Field(default="", description="name of the engine, in a process with several")

    @model_validator(mode="after")
    def _check_stop(self) -> Request:
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty string would end every output; remove it")
        if self.score_from is not None:
            if self.score_from >= len(self.ids):
                raise ValueError(f"score_from: at most {len(self.ids) - 1}, which scores the last id")
            if self.prompt_log_probs or self.grammar is not None or self.forced_prefix:
                raise ValueError("score_from: not with prompt_log_probs, grammar or forced_prefix")
        return self

    @property
    def n_prefilled(self) -> int:
        """Ids whose positions are computed before the first sample: the last id of a scored text is only a target."""
        return len(self.ids) - (self.score_from is not None)

    @property
    def first_scored_position(self) -> int | None:
        """First position whose logits score an id of the prompt, or None."""
        if self.score_from is not None:
            return self.score_from - 1
        return 0 if self.prompt_log_probs else None

    def check(
        self, vocab_size: int, max_positions: int, limit: str, *, can_compile_grammars: bool, has_token_bytes: bool
    ) -> None:  # fmt: skip
        """Check the request against an engine.

        Args:
            max_positions: longest sequence. limit: what sets it, for the message.

        Raises:
            ConfigError: the engine cannot serve it; the message names the field.
        """
        n = self.n_prefilled
        if max(self.ids + self.suffix) >= vocab_size:
            raise ConfigError(
                f"ids: {max(self.ids + self.suffix)} is not an id of this model",
                expected=f"0 to {vocab_size - 1}",
                do="encode the prompt with this model's tokenizer",
            )
        n_output = int(self.score_from is None) + len(self.suffix)
        if n + n_output > max_positions:
            raise ConfigError(
                f"ids: the prompt has {len(self.ids):,} tokens and {limit} holds {max_positions:,}",
                expected=f"at most {max_positions - 1:,}, which leaves one position for the output"
                if n_output
                else f"at most {max_positions + 1:,}; the last one needs no position",
            )
        self.sampling.check_ids(vocab_size)
        if self.grammar is not None and not can_compile_grammars:
            raise ConfigError(
                "grammar is set, and the engine has no compile_grammar",
                expected="a request without a grammar",
            )
        if self.forced_prefix and not has_token_bytes:
            raise ConfigError(
                "forced_prefix is set, and the engine has no token_bytes",
                expected="a request without forced_prefix",
            )


# Neither `Token` nor `Delta` is frozen: that makes their construction five times slower, a fifth of the engine's Python.
@dataclass(slots=True)
class Token:
    """One sampled token; not changed after it is made.

    log_prob: under the sampling distribution (temperature, penalties, cuts).
    raw_log_prob: under the model's own distribution.
    alternatives: the model's most likely ids with their raw log-probabilities.
    version: of the weights that produced it.
    """

    id: int
    log_prob: float
    raw_log_prob: float
    alternatives: Alternatives = ()
    version: int = 0


@dataclass(slots=True)
class Delta:
    """The result of one step for one request; not changed after it is made.

    tokens: new tokens, in order. text: bytes that may be shown now. finish_reason: None while the request runs.
    n_forced: how many of the tokens, the first ones, lie within the forced prefix; `max_tokens` does not count them.
    cached_tokens: prompt positions found in the prefix cache, returned with the first token or the scores.
    prompt_log_probs, prompt_greedy: of each scored id of the prompt: its log-probability, and whether it is the most likely.
    prompt_alternatives: the most likely ids in its place, if `top_log_probs` is set.
    error: why the request's own grammar ended it with "abort"; "" for every other end.
    """

    request_id: str
    tokens: tuple[Token, ...] = ()
    text: bytes = b""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_log_probs: tuple[float, ...] = ()
    n_forced: int = 0
    error: str = ""
    prompt_greedy: tuple[bool, ...] = ()
    prompt_alternatives: tuple[Alternatives, ...] = ()


@dataclass
class Generation:
    """A finished request: its tokens with the stop id, and the text without forced prefix, stop ids and stop strings."""

    tokens: list[Token] = field(default_factory=list)
    text: bytes = b""
    finish_reason: FinishReason | None = None

    @property
    def ids(self) -> list[int]:
        """The sampled ids, with the stop id."""
        return [token.id for token in self.tokens]
