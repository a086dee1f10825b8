"""The schedule of a load: prompts and send times as a pure function of configuration, texts and seed.

    schedule_requests(LoadConfig(requests=100, rate=4.0), pool) -> 100 x ScheduledRequest

Arrivals are open-loop: a request is sent at its time even if earlier ones are unanswered, as with independent users. Gaps
are gamma distributed with mean 1 / rate and shape b (the burstiness):

    b = 1: Poisson process;   b < 1: bursts;   large b: nearly constant gaps
    coefficient of variation = 1 / sqrt(b)

Gaps are drawn for rate 1 and divided by the rate, and each quantity has a separate random stream. So all rates of a curve
use the same requests in the same rhythm, more requests extend the same sequence, and another distribution of output
lengths does not change the prompts (tests).

A closed loop (`concurrency` callers that wait for each response) slows down with the server, so it cannot overload it and
hides queueing delays (Tene's "coordinated omission"). It is useful for measuring throughput.

Lengths are written as text: 128, fixed:128, uniform:16,512, lognormal:128,0.8 (median, sigma of the logarithm) or
lognormal:128,0.8,2048 (with a maximum). Pairs of prompt and output lengths can be read from a file and are drawn with
replacement, which keeps their correlation. Prompts are cut from a pool of ids, or of text without a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, model_validator

from whorl.data.formats import format_name
from whorl.data.formats.jsonl import parse_object
from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError, DataError
from whorl.loadtest.config import LoadShape
from whorl.tracking.seeds import numpy_rng

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 1 << 20  # tokens
CHARACTERS_PER_TOKEN = 4  # approximate, for English; results use the server's count
Prompt = str | tuple[int, ...] | tuple[tuple[str, str], ...]  # a text, ids, or messages as (role, content)


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths in tokens: fixed (n), uniform (minimum, maximum) or lognormal (median, sigma, maximum)."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        """Draw `n` lengths, each at least 1."""
        if self.kind == "fixed":
            return [int(self.parameters[0])] * n
        if self.kind == "uniform":
            low, high = map(int, self.parameters)
            return [int(x) for x in rng.integers(low, high + 1, n)]
        median, sigma, most = self.parameters
        return [round(min(most, max(1.0, median * math.exp(sigma * z)))) for z in rng.standard_normal(n)]


def parse_lengths(text: str, field: str = "lengths") -> LengthDistribution:
    """Parse a distribution (format: top of this file).

    Raises:
        ConfigError: invalid text; the message names `field`.
    """
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "fixed", text
    arity = {"fixed": (1, 1), "uniform": (2, 2), "lognormal": (2, 3)}.get(kind.strip())
    try:
        numbers = [float(part) for part in rest.split(",")]
        if arity is None or not arity[0] <= len(numbers) <= arity[1]:
            raise ValueError
        if kind == "lognormal" and len(numbers) == 2:
            numbers.append(MAX_LENGTH)
        sigma = numbers.pop(1) if kind == "lognormal" else 0.0
        whole = all(1 <= x <= MAX_LENGTH and x == int(x) for x in numbers)
        if not whole or numbers != sorted(numbers) or not 0 <= sigma <= 10:
            raise ValueError
        if kind == "lognormal":
            numbers.insert(1, sigma)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{field} is {text!r}",
            expected=f"128, uniform:16,512 or lognormal:128,0.8[,2048]; integers from 1 to {MAX_LENGTH:,}",
        ) from None
    return LengthDistribution(kind.strip(), tuple(numbers))


class LoadConfig(LoadShape):
    """One load. Exactly one of `rate` and `concurrency` is set; an infinite rate sends all requests at once."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rate: float | None = Field(default=None, gt=0, description="arrivals per second, open loop")
    concurrency: int | None = Field(
        default=None, ge=1, description="closed loop: callers that wait for each response"
    )
    prompt_lengths: LengthDistribution = LengthDistribution("lognormal", (128, 0.6, 2048))
    output_lengths: LengthDistribution = LengthDistribution("lognormal", (64, 0.6, 1024))
    length_pairs: tuple[tuple[int, int], ...] = Field(
        default=(), description="(prompt, output) lengths, instead of both distributions"
    )
    prefix_tokens: int = Field(default=0, ge=0, description="shared prefix length of synthetic prompts")
    n_prefixes: int = Field(default=1, ge=1, description="number of different shared prefixes")

    @model_validator(mode="after")
    def _check_one_mode(self) -> LoadConfig:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("set exactly one of rate and concurrency")
        return self


@dataclass(frozen=True)
class ScheduledRequest:
    """One planned request. send_time: seconds after the start (0 in a closed loop)."""

    number: int
    send_time: float
    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class PromptPool:
    """The text or the ids from which synthetic prompts are cut."""

    units: str | tuple[int, ...]

    @property
    def per_token(self) -> int:
        return CHARACTERS_PER_TOKEN if isinstance(self.units, str) else 1

    def cut(self, start: int, tokens: int) -> str | tuple[int, ...]:
        """Return `tokens` tokens from position `start`, wrapping around at the end."""
        n, at = tokens * self.per_token, start % len(self.units)
        units = self.units
        while len(units) < at + n:
            units = units + units  # type: ignore[operator]
        return units[at : at + n]


def arrival_times(config: LoadConfig) -> list[float]:
    """Return the send times in seconds, ascending from 0."""
    if config.rate is None or math.isinf(config.rate):
        return [0.0] * config.requests
    rng, shape = numpy_rng(config.seed, "load", "arrivals"), config.burstiness
    gaps = rng.gamma(shape, 1 / shape, config.requests - 1)
    times, now = [0.0], 0.0
    for gap in gaps:
        now += float(gap)
        times.append(now / config.rate)
    return times


def schedule_requests(
    config: LoadConfig, texts: PromptPool | Sequence[tuple[Prompt, int | None]]
) -> list[ScheduledRequest]:
    """Return all requests of a load in order of their send times.

    Args:
        texts: a pool from which prompts are cut, or a list of prompts, each with an output length or None. A list is used in
            shuffled order and repeated if it is too short.

    Raises:
        ConfigError: `texts` is empty.
    """

    def rng(name: str) -> np.random.Generator:
        return numpy_rng(config.seed, "load", name)

    n = config.requests
    if not (len(texts.units) if isinstance(texts, PromptPool) else len(texts)):
        raise ConfigError("no text for prompts", expected="at least one prompt or character")
    if config.length_pairs:
        pairs = [
            config.length_pairs[i] for i in rng("pairs").integers(0, len(config.length_pairs), n).tolist()
        ]
        ins, outs = [a for a, _ in pairs], [b for _, b in pairs]
    else:
        ins = config.prompt_lengths.draw(rng("prompt lengths"), n)
        outs = config.output_lengths.draw(rng("output lengths"), n)
    times = arrival_times(config)
    prompts: list[Prompt] = []
    if isinstance(texts, PromptPool):
        starts = rng("starts").integers(0, len(texts.units), n).tolist()
        heads = rng("prefixes").integers(0, config.n_prefixes, n).tolist()
        firsts = rng("prefix starts").integers(0, len(texts.units), config.n_prefixes).tolist()
        for length, start, head in zip(ins, starts, heads, strict=True):
            prefix, own = texts.cut(firsts[head], config.prefix_tokens), texts.cut(start, length)
            prompts.append(prefix + own)  # type: ignore[operator]
    else:
        order: list[int] = []
        shuffle = rng("order")
        while len(order) < n:
            order += shuffle.permutation(len(texts)).tolist()
        prompts = [texts[i][0] for i in order[:n]]
        outs = [texts[i][1] or out for i, out in zip(order, outs, strict=False)]
    return [ScheduledRequest(i, times[i], prompts[i], outs[i]) for i in range(n)]


def read_prompts(path: Path) -> list[tuple[Prompt, int | None]]:
    """Read prompts from a file: one per line of a text file. JSON lines have `prompt`, `question`, `messages` or ShareGPT's
    `conversations` (up to the first answer), and optionally `max_tokens` or `output_tokens`.

    Raises:
        DataError: an invalid line, with its number.
    """
    entries: list[tuple[Prompt, int | None]] = []
    for number, line in _lines(path):
        if format_name(str(path), {".json": "jsonl"}) != "jsonl":
            entries.append((line, None))
            continue
        entry = _parse_object(path, number, line)
        length = entry.get("max_tokens", entry.get("output_tokens"))
        prompt = _prompt(entry)
        if prompt is None or not (length is None or (type(length) is int and 1 <= length <= MAX_LENGTH)):
            raise DataError(
                f"{path}, line {number} is not a valid prompt: {line[:80]}",
                expected="prompt, question, messages or conversations, and optionally max_tokens as an integer",
            )
        entries.append((prompt, length))
    if not entries:
        raise DataError(f"{path} contains no prompts", expected="one per line")
    return entries


def read_length_pairs(path: Path) -> tuple[tuple[int, int], ...]:
    """Read pairs of prompt and output lengths: two integers per line, or JSON lines with prompt_tokens and output_tokens.

    Raises:
        DataError: an invalid line, with its number.
    """
    entries: list[tuple[int, int]] = []
    for number, line in _lines(path):
        try:
            if line.startswith("{"):
                entry = _parse_object(path, number, line)
                pair = [entry["prompt_tokens"], entry["output_tokens"]]
            else:
                pair = [int(part) for part in line.replace(",", " ").split()]
            if len(pair) != 2 or any(type(x) is not int or not 1 <= x <= MAX_LENGTH for x in pair):
                raise ValueError
        except (ValueError, KeyError):
            if number == 1 and not line.startswith("{"):
                continue  # the header
            raise DataError(
                f"{path}, line {number}: {line[:80]!r}",
                expected="prompt length and output length in tokens",
            ) from None
        entries.append((pair[0], pair[1]))
    if not entries:
        raise DataError(f"{path} contains no lengths", expected="two integers per line")
    return tuple(entries)


def _prompt(entry: Mapping[str, Any]) -> Prompt | None:
    for name in ("prompt", "question"):
        if isinstance(entry.get(name), str) and entry[name]:
            text: str = entry[name]
            return text
    turns = entry.get("messages", entry.get("conversations"))
    if not isinstance(turns, list):
        return None
    names = {"human": "user", "gpt": "assistant"}
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        if names.get(role, role) == "assistant" and "conversations" in entry:
            break
        messages.append((names.get(role, role), content))
    return tuple(messages) or None


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", expected="a UTF-8 text file") from error
    return [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse_object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    entry = parse_object(line.encode("utf-8", "replace"))
    if isinstance(entry, BadRecordError):
        raise DataError(f"{path}, line {number}: {entry.detail}: {line[:80]}", expected="one object per line")
    return entry
