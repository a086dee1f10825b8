"""Prompts for the samples of a model: Python definitions for Python, otherwise how texts of the corpus begin."""

from __future__ import annotations

from collections.abc import Sequence

from whorl.evals.grading.programs import parse_or_none

PYTHON_PROMPTS = ("def ", 'class Node:\n    """')
CHECKED_TEXTS = 8
OPENING_CHARACTERS = 40


def is_python(texts: Sequence[str]) -> bool:
    """Return whether most of the first texts define something and parse as Python."""
    checked = texts[:CHECKED_TEXTS]
    return 2 * sum(_parses(text) for text in checked) > len(checked)


def first_prompt(texts: Sequence[str]) -> str:
    """Return the prompt of a short sample: `def ` for Python, else the first words of a text."""
    if is_python(texts):
        return PYTHON_PROMPTS[0]
    lines = (line.strip() for text in texts for line in text.splitlines())
    some = [line for line, _ in zip(lines, range(50), strict=False)]
    line = max(filter(has_words, some), key=len, default="") or max(some, key=len, default="")
    if len(line) <= OPENING_CHARACTERS:
        return line
    return line[:OPENING_CHARACTERS].rpartition(" ")[0] or line[:OPENING_CHARACTERS]


def has_words(text: str) -> bool:
    """Return whether at least half of the characters that are no white space are letters: no ruler such as `####`."""
    characters = [c for c in text if not c.isspace()]
    return 0 < len(characters) <= 2 * sum(c.isalpha() for c in characters)


def _parses(text: str) -> bool:
    return ("def " in text or "class " in text) and parse_or_none(text) is not None
