"""Removal of lines by the rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2).

A line stays if it ends with terminal punctuation, has enough words, and mentions neither Javascript nor a policy of a page.
The order of the rules, the ellipsis, the longest word and the phrases of policies are those of C4's published code. The
measure `rules` counts the lines that stay by default (`c4_lines`). Rules of words and line ends do not apply to lines in
scripts without spaces between words, such as Chinese.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.deduplication.shingles import NO_SPACES
from whorl.corpus.measures.rules import CITATION, MAX_UNSPACED, MAX_WORD_CHARACTERS, MIN_LINE_WORDS, POLICIES

TERMINAL = (".", "?", "!", '"', "'")


class C4LineConfig(BaseModel):
    """Which lines go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    terminal_punctuation: bool = Field(
        default=True,
        description="remove lines that do not end with one of . ? ! \" ' or that end with an ellipsis",
    )
    min_words: int = Field(
        default=MIN_LINE_WORDS, ge=1, description="remove lines with fewer words, blank ones too"
    )
    max_word_characters: int = Field(
        default=MAX_WORD_CHARACTERS, ge=1, description="remove lines with a longer word"
    )
    javascript: bool = Field(default=True, description='remove lines with the word "javascript"')
    policies: bool = Field(
        default=True, description="remove lines with a phrase such as 'terms of use' or 'use cookies'"
    )


def bad_line(line: str, config: C4LineConfig) -> str:
    """Return the name of the first rule by which a line goes, or "". Marks such as [1] at its end do not count."""
    words = line.split()
    if not words:
        return "blank"
    stripped = line.strip()
    plain = CITATION.sub("", stripped)
    if len(NO_SPACES.findall(stripped)) <= MAX_UNSPACED * len(stripped):
        if max(map(len, words)) > config.max_word_characters:
            return "long_word"
        if config.terminal_punctuation and (not plain.endswith(TERMINAL) or plain.endswith("...")):
            return "no_terminal_punctuation"
        if len(words) < config.min_words:
            return "few_words"
    lower = plain.lower()
    if config.javascript and "javascript" in lower:
        return "javascript"
    if config.policies and any(phrase in lower for phrase in POLICIES):
        return "policy"
    return ""


def without_bad_lines(text: str, config: C4LineConfig) -> tuple[str, dict[str, list[str]]]:
    """Return the text without the lines that go, and these lines with their line ends: rule -> lines.

    Lines are those of `str.splitlines`. The others do not change.
    """
    kept, gone = list[str](), dict[str, list[str]]()
    for line in text.splitlines(keepends=True):
        rule = bad_line(line, config)
        (gone.setdefault(rule, []) if rule else kept).append(line)
    return "".join(kept), gone
