"""Filters: published rules as comparisons of columns with thresholds.

filter_text("gopher_quality", text)     the reason to drop a text, or ""
CurateConfig(filters=["c4", "fineweb"]) the same in `curate`, each reason with its count
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.measures.repetition import DUPLICATE_ORDERS, TOP_ORDERS
from whorl.corpus.measures.rules import MAX_UNSPACED
from whorl.errors import ConfigError, one_of

_COMPARE = {"<": operator.lt, ">": operator.gt, "=": operator.eq}
# Columns that count words or ends of sentences: their rules are skipped for scripts without spaces between words.
OF_WORDS = {
    "n_wordlike", "mean_word_length", "hash_ratio", "ellipsis_ratio", "letter_word_fraction", "stop_words", "c4_sentences",
    "terminal_line_fraction", "short_line_fraction", "line_feeds_per_word",
    *(f"top_{n}_gram_characters" for n in TOP_ORDERS), *(f"duplicate_{n}_gram_characters" for n in DUPLICATE_ORDERS),
}  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """Rules on the columns of a measure; the first that holds is the reason.

    rules: reason -> (column, "<", ">" or "=", threshold).
    """

    measure: str
    source: str
    rules: Mapping[str, tuple[str, str, float | bool]]

    def reason(self, columns: Mapping[str, Any]) -> str:
        """Return the reason to drop a document with these columns, or ""."""
        for reason, (column, comparison, threshold) in self.rules.items():
            if column in OF_WORDS and columns["unspaced_fraction"] > MAX_UNSPACED:
                continue
            if _COMPARE[comparison](columns[column], threshold):
                return reason
        return ""

    def sql(self, name: str) -> str:
        """Return the rules as the branches of an SQL CASE, with reasons NAME:REASON."""
        of_words = f" AND unspaced_fraction <= {MAX_UNSPACED}"
        return " ".join(
            f"WHEN {column} {comparison} {str(threshold).lower()}{of_words if column in OF_WORDS else ''} "
            f"THEN '{name}:{reason}'"
            for reason, (column, comparison, threshold) in self.rules.items()
        )


_TOP = {2: 0.2, 3: 0.18, 4: 0.16}
_DUPLICATE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

FILTERS = {
    "gopher_quality": Filter(
        "rules",
        "Rae et al. 2021, appendix A1",
        {
            "short": ("n_wordlike", "<", 50),
            "long": ("n_wordlike", ">", 100_000),
            "short_words": ("mean_word_length", "<", 3),
            "long_words": ("mean_word_length", ">", 10),
            "hashes": ("hash_ratio", ">", 0.1),
            "ellipses": ("ellipsis_ratio", ">", 0.1),
            "bullets": ("bullet_line_fraction", ">", 0.9),
            "line_ellipses": ("ellipsis_line_fraction", ">", 0.3),
            "few_letters": ("letter_word_fraction", "<", 0.8),
            "few_stop_words": ("stop_words", "<", 2),
        },
    ),
    "gopher_repetition": Filter(
        "rules",
        "Rae et al. 2021, table A1",
        {
            "paragraphs": ("duplicate_paragraph_fraction", ">", 0.3),
            "paragraph_characters": ("duplicate_paragraph_characters", ">", 0.2),
            "lines": ("duplicate_line_fraction", ">", 0.3),
            "line_characters": ("duplicate_line_characters", ">", 0.2),
            **{f"top_{n}_gram": (f"top_{n}_gram_characters", ">", limit) for n, limit in _TOP.items()},
            **{
                f"duplicate_{n}_gram": (f"duplicate_{n}_gram_characters", ">", limit)
                for n, limit in _DUPLICATE.items()
            },
        },
    ),
    "c4": Filter(
        "rules",
        "Raffel et al. 2020, section 2.2",
        {
            "lorem_ipsum": ("c4_lorem_ipsum", "=", True),
            "curly_bracket": ("c4_curly_bracket", "=", True),
            "few_sentences": ("c4_sentences", "<", 5),
        },
    ),
    "fineweb": Filter(
        "rules",
        "Penedo et al. 2024, section 3.5",
        {
            "few_line_ends": ("terminal_line_fraction", "<", 0.12),
            "short_lines": ("short_line_fraction", ">", 0.67),
            "repeated_lines": ("line_repeat_characters", ">", 0.01),
            "lists": ("line_feeds_per_word", ">", 0.3),
        },
    ),
}


def get_filter(name: str) -> Filter:
    """Return a filter. Raises ConfigError: it is unknown."""
    if name not in FILTERS:
        raise ConfigError(f"unknown filter {name!r}", expected=one_of(name, list(FILTERS)))
    return FILTERS[name]


def filter_text(name: str, text: str) -> str:
    """Return the reason for which a filter drops one text, or "". Raises ConfigError: the filter is unknown."""
    chosen = get_filter(name)
    return chosen.reason(measure_texts(chosen.measure, [text])[0])


def filtered_query(query: str, filters: Sequence[str]) -> str:
    """Return the query with the reasons of filters for the documents that it keeps."""
    if not filters:
        return query
    cases = " ".join(get_filter(name).sql(name) for name in filters)
    return (
        f"SELECT q.row AS row, CASE WHEN q.reason <> '' THEN q.reason {cases} ELSE '' END AS reason "
        f"FROM ({query}) AS q JOIN attributes AS a ON a.row = q.row"
    )


def check_filter(name: str) -> str:
    """Return the name of a filter, for a field of a configuration. Raises ValueError: it is unknown."""
    if name not in FILTERS:
        raise ValueError(one_of(name, list(FILTERS)))
    return name
