"""Numbered sources: passages in a prompt, and the numbers by which an answer cites them.

    Answer from these sources and cite them, as in [1].

    [1] title: a passage. [1]
    [2] another passage [2]

    the question

Training (`evals/suites/cited_sources.py`) and the server write the same text. An answer cites by number: "Oslo. [2]".
The number is also behind a passage, where a small model copies it together with the fact before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

INSTRUCTION = "Answer from these sources and cite them, as in [1]."


class SourcePassage(NamedTuple):
    """A passage that a prompt may contain."""

    text: str
    title: str = ""


def with_sources(question: str, sources: Sequence[SourcePassage]) -> str:
    """Return the prompt above; the question alone without sources."""
    named = (f"{title}: {text}" if title else text for text, title in sources)
    lines = [f"[{n}] {text} [{n}]" for n, text in enumerate(named, 1)]
    return "\n\n".join((INSTRUCTION, "\n".join(lines), question)) if lines else question


def within_budget(
    sources: Sequence[SourcePassage], n_tokens: Callable[[str], int], budget: int
) -> list[SourcePassage]:
    """Return the first sources whose prompt has at most `budget` tokens; the last of them may be cut behind a word.

    n_tokens: of a text.
    """
    kept: list[SourcePassage] = []
    for text, title in sources:
        words = text.split(" ")
        low, middle, high = 0, len(words), len(words)  # words that fit; all are tried first
        while low < high:
            part = SourcePassage(" ".join(words[:middle]), title)
            fits = n_tokens(with_sources("", [*kept, part])) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
            middle = (low + high + 1) // 2
        kept += [SourcePassage(" ".join(words[:low]), title)] if low else []
        if low < len(words):
            break
    return kept
