"""What a load test sends, and when: a pure function of its configuration, its texts and one seed.

    plan(LoadConfig(requests=100, rate=4.0), pool) -> 100 x Planned(at, prompt, max_tokens)

Arrivals are open-loop: the n-th request goes out at its time whether or not those before it were answered, as with people
who do not know of each other. Times between arrivals are gamma distributed with mean 1 / rate and shape b, the burstiness:

    b = 1: exponential times, a Poisson process;   b < 1: bursts and lulls;   b large: a metronome
    coefficient of variation = 1 / sqrt(b)

Their sequence is drawn for rate 1 and then divided by the rate, and each quantity has a random stream of its own. So the
points of one curve over several rates see the same requests in the same rhythm, only faster; more requests continue fewer
ones; and another distribution of output lengths moves no prompt (tests).

A closed loop (`concurrency` callers who each wait for their answer) cannot overload a server: it slows down with it, and
the waiting that real users would have suffered is never seen (Tene's "coordinated omission"). It is offered because it
measures throughput well, and called by its name in the results.

Lengths are written as texts: 128, fixed:128, uniform:16,512, lognormal:128,0.8 (median and sigma of the logarithm) with a
most, lognormal:128,0.8,2048; or pairs of prompt and output lengths from a file, drawn with replacement, which keep what the
two have to do with each other. Prompts are then stretches of a pool of ids, or of text where the server cannot tokenise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.errors import ConfigError, DataError
from whorl.tracking.seeds import numpy_rng

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 1 << 20  # tokens: nobody means more
CHARACTERS_PER_TOKEN = 4  # of English, about; the server's own count is what the results use
Prompt = str | tuple[int, ...] | tuple[tuple[str, str], ...]  # a text, ids, or messages as (role, content)


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths in tokens: `kind` fixed (n), uniform (least, most) or lognormal (median, sigma, most)."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        """`n` lengths, each at least 1."""
        if self.kind == "fixed":
            return [int(self.parameters[0])] * n
        if self.kind == "uniform":
            low, high = map(int, self.parameters)
            return [int(x) for x in rng.integers(low, high + 1, n)]
        median, sigma, most = self.parameters
        return [round(min(most, max(1.0, median * math.exp(sigma * z)))) for z in rng.standard_normal(n)]


def parse_lengths(text: str, field: str = "lengths") -> LengthDistribution:
    """A distribution from its text (see the top of this file).

    Raises:
        ConfigError: it is none; `field` is named.
    """
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "fixed", text
    wanted = {"fixed": (1, 1), "uniform": (2, 2), "lognormal": (2, 3)}.get(kind.strip())
    try:
        numbers = [float(part) for part in rest.split(",")]
        if wanted is None or not wanted[0] <= len(numbers) <= wanted[1]:
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
            expected=f"128, uniform:16,512 or lognormal:128,0.8[,2048], in whole tokens from 1 to {MAX_LENGTH:,}",
        ) from None
    return LengthDistribution(kind.strip(), tuple(numbers))


class LoadConfig(BaseModel):
    """A load. Of `rate` and `concurrency` exactly one; an infinite rate sends everything at once."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    requests: int = Field(default=100, ge=1)
    rate: float | None = Field(default=None, gt=0, description="arrivals a second, whoever waits")
    concurrency: int | None = Field(default=None, ge=1, description="callers who each wait for their answer")
    burstiness: float = Field(
        default=1.0, gt=0, description="shape of the gamma between arrivals; 1 is Poisson"
    )
    seed: int = 0
    prompt_lengths: LengthDistribution = LengthDistribution("lognormal", (128, 0.6, 2048))
    output_lengths: LengthDistribution = LengthDistribution("lognormal", (64, 0.6, 1024))
    length_pairs: tuple[tuple[int, int], ...] = Field(
        default=(), description="(prompt, output), instead of both"
    )
    prefix_tokens: int = Field(
        default=0, ge=0, description="that each synthetic prompt begins with, in common"
    )
    n_prefixes: int = Field(default=1, ge=1, description="different beginnings")

    @model_validator(mode="after")
    def _check_one_mode(self) -> LoadConfig:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give either a rate or a concurrency")
        return self


@dataclass(frozen=True)
class ScheduledRequest:
    """One request to come. at: seconds after the beginning (0 in a closed loop)."""

    number: int
    send_time: float
    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class PromptPool:
    """What synthetic prompts are stretches of: ids, or a text."""

    units: str | tuple[int, ...]

    @property
    def per_token(self) -> int:
        return CHARACTERS_PER_TOKEN if isinstance(self.units, str) else 1

    def cut(self, start: int, tokens: int) -> str | tuple[int, ...]:
        """`tokens` tokens from `start` on, beginning anew at the end."""
        n, at = tokens * self.per_token, start % len(self.units)
        units = self.units
        while len(units) < at + n:
            units = units + units  # type: ignore[operator]
        return units[at : at + n]


def arrival_times(config: LoadConfig) -> list[float]:
    """Seconds at which requests go out, ascending, the first at 0."""
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
    """All requests of a load, in the order of their times.

    Args:
        texts: a pool that prompts are cut from, or prompts of their own, each with its output length if it has one; those
            are taken in a shuffled order, again from the beginning when there are too few.

    Raises:
        ConfigError: there are no texts.
    """

    def rng(name: str) -> np.random.Generator:
        return numpy_rng(config.seed, "load", name)

    n = config.requests
    if not (len(texts.units) if isinstance(texts, PromptPool) else len(texts)):
        raise ConfigError("there is no text to make prompts of", expected="at least one prompt or character")
    if config.length_pairs:
        chosen = [
            config.length_pairs[i] for i in rng("pairs").integers(0, len(config.length_pairs), n).tolist()
        ]
        ins, outs = [a for a, _ in chosen], [b for _, b in chosen]
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
    """Prompts from a file: a text has one a line; JSON lines have `prompt`, `question`, `messages` or ShareGPT's
    `conversations` (what stands before the first answer), and may have `max_tokens` or `output_tokens`.

    Raises:
        DataError: a line is none of it; the line is named.
    """
    found: list[tuple[Prompt, int | None]] = []
    for number, line in _lines(path):
        if path.suffix not in (".jsonl", ".json"):
            found.append((line, None))
            continue
        entry = _parse_object(path, number, line)
        length = entry.get("max_tokens", entry.get("output_tokens"))
        prompt = _prompt(entry)
        if prompt is None or not (length is None or (type(length) is int and 1 <= length <= MAX_LENGTH)):
            raise DataError(
                f"{path}, line {number} is no prompt: {line[:80]}",
                expected="prompt, question, messages or conversations, and max_tokens as a whole number if at all",
            )
        found.append((prompt, length))
    if not found:
        raise DataError(f"{path} holds no prompts", expected="one a line")
    return found


def read_length_pairs(path: Path) -> tuple[tuple[int, int], ...]:
    """Pairs of prompt and output lengths: two whole numbers a line, or JSON lines with prompt_tokens and output_tokens.

    Raises:
        DataError: a line is neither; the line is named.
    """
    found: list[tuple[int, int]] = []
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
                continue  # the names of the columns
            raise DataError(
                f"{path}, line {number}: {line[:80]!r}",
                expected="a prompt's length and an output's, in tokens",
            ) from None
        found.append((pair[0], pair[1]))
    if not found:
        raise DataError(f"{path} holds no lengths", expected="two whole numbers a line")
    return tuple(found)


def _prompt(entry: dict[str, Any]) -> Prompt | None:
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
        role, said = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(said, str):
            return None
        if names.get(role, role) == "assistant" and "conversations" in entry:
            break
        messages.append((names.get(role, role), said))
    return tuple(messages) or None


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", expected="a file of text in UTF-8") from error
    return [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is no JSON: {error}", expected="an object a line") from error
    if not isinstance(entry, dict):
        raise DataError(f"{path}, line {number} is no object: {line[:80]}", expected="an object a line")
    return entry
