"""Repetition of a text, and the variety of several.

    distinct_n     different n-grams of words / n-grams of words                     Li et al. 2016, arXiv:1510.03055
    loop           share of the text's words in its longest part that repeats at once, at least three times
    lines          share of lines that occurred before                               Rae et al. 2021, arXiv:2112.11446
    compression    bytes / compressed bytes (zlib)

Words are runs without white space; each character of scripts without spaces is a word. distinct_n falls with the length of
a text. So texts are compared at the same number of words: `limit` cuts them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import regex

from whorl.errors import ConfigError
from whorl.evals.grading.grade import Grade

LOOP = 0.5  # share of words in a loop from which a text counts as degenerate
MIN_REPEATS = 3
MAX_PERIOD = 100
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[^\s\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]+"
)


def words_of(text: str, limit: int = 0) -> list[str]:
    """Return the words of a text, the first `limit` of them if it is not 0."""
    words: list[str] = _WORD.findall(text.lower())
    return words[:limit] if limit else words


def distinct_n(words: Sequence[str], n: int) -> float:
    """Return different n-grams / n-grams; 1 for a text of fewer words.

    Raises:
        ConfigError: n is less than 1.
    """
    if n < 1:
        raise ConfigError(f"n-grams of {n} words", expected="n of 1 or more")
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_share(words: Sequence[str]) -> float:
    """Return the share of words in the longest run of one part repeated at once, MIN_REPEATS times or more.

    A part has up to MAX_PERIOD words. Words i and i + p agree over a run of length r: a part of p words repeats
    1 + r / p times.
    """
    longest = 0
    for period in range(1, min(MAX_PERIOD, len(words) // MIN_REPEATS) + 1):
        run = 0
        for i in range(len(words) - period):
            run = run + 1 if words[i] == words[i + period] else 0
            if run >= (MIN_REPEATS - 1) * period:
                longest = max(longest, run + period)
    return longest / len(words) if words else 0.0


def repeated_lines(text: str) -> float:
    """Return the share of lines with text that equal an earlier line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def compression_ratio(text: str) -> float:
    """Return bytes / compressed bytes; 0 for an empty text."""
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data, 9)) if data else 0.0


def repetition(gold: Any, text: str, *, finish: str = "stop", limit: int = 256) -> Grade:
    """Return distinct_1 to distinct_4, loop, lines and compression; right if the text is not empty and has no long loop.

    Args:
        gold: not used.
        finish: not used.
        limit: words that count; 0 for all.
    """
    words = words_of(text, limit)
    scores = {f"distinct_{n}": distinct_n(words, n) for n in range(1, 5)}
    scores |= {
        "loop": loop_share(words),
        "lines": repeated_lines(text),
        "compression": compression_ratio(text),
    }
    if not words:
        return Grade.of(scores, "not_found", "the answer is empty")
    if scores["loop"] >= LOOP:
        return Grade.of(scores, "wrong", f"{scores['loop']:.0%} of its words are a loop")
    return Grade.of(scores, "right", "no long loop")
