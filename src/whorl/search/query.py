"""Queries of every index: their text and their filters.

    parse date            each word is searched; documents with more and rarer ones come first
    "parse a date"        the words in this order, required
    -naive                documents without it
    pars*                 words that begin so

A quote without its partner is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from whorl.errors import one_of, shorten
from whorl.search.analysis import WORD, Analysis, split
from whorl.search.documents import FieldValue, QueryError, SearchQuery

if TYPE_CHECKING:
    from whorl.search.index import Index

MAX_WORDS = 256  # of a query; the rest of a longer one is not searched
_PART = re.compile(r'(?:(?<=\s)|^)(-?)(?:"([^"]*)"|([^\s"]+))|"([^"]*)"|([^\s"]+)')
SHORT, LONG = 4, 8  # letters of a word that may have one edit, and two
EXPANDED = 50  # words of a prefix
NO_TERM = "?"  # in no text
GAP = 10  # positions between the title and the text on a server: no phrase spans both
SEPARATOR = "\x01"  # between the name and the value of an exact field there
Phrase = Sequence[str]  # stems in this order; one is a word


def parse_query(text: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the words, phrases, excluded parts and prefixes of the text of a query, at most `MAX_WORDS`."""
    words, phrases, excluded, prefixes = [], [], [], []
    for found in list(_PART.finditer(text))[:MAX_WORDS]:
        phrase, word = found[2] or found[4], found[3] or found[5] or ""
        if found[1]:
            excluded.append(phrase or word)
        elif phrase:
            phrases.append(phrase)
        elif word.endswith("*") and len(word) > 1:
            prefixes.append(word[:-1])
        else:
            words.append(word)
    return list(dict.fromkeys(words)), phrases, excluded, prefixes


@dataclass(frozen=True)
class QueryPlan:
    """A query as stems. A passage fits all of `must`, none of `never`, and one of `should` unless there is a `must`.

    Attributes:
        should: words and synonyms. begins: for each prefix, alternatives that count as one of `should`.
        steps: (step, result) of the analysis, for display.
    """

    should: Sequence[Phrase]
    begins: Sequence[Sequence[str]]
    must: Sequence[Phrase]
    never: Sequence[Phrase]
    steps: Sequence[tuple[str, Sequence[str]]]

    @property
    def some(self) -> list[Phrase]:
        """All of which one must fit."""
        return [*self.should, *([stem] for stems in self.begins for stem in stems)]

    @property
    def stems(self) -> list[str]:
        """Those that count in a score, and are marked."""
        return list(dict.fromkeys(stem for phrase in (*self.some, *self.must) for stem in phrase))


def plan_query(query: SearchQuery, analysis: Analysis, index: Index) -> QueryPlan:
    """Return the plan of a query. A word without a document becomes the most frequent one near it."""
    asked, phrases, excluded, beginnings = parse_query(query.text)

    def most_frequent(words: Iterable[str]) -> list[str]:
        stems = {word: analysis.stem(word) for word in words}
        found = index.frequencies([*stems.values()]) if stems else {}
        return sorted(stems, key=lambda word: -found[stems[word]])

    words = analysis.words(" ".join(asked))
    known = index.frequencies([analysis.stem(word) for word in words]) if words and query.typos else {}
    typos = {word for word in words if query.typos and len(word) >= SHORT and not known[analysis.stem(word)]}
    corrected = [(most_frequent(index.near(word)) or [word])[0] if word in typos else word for word in words]
    stems = [analysis.stem(word) for word in corrected]
    same = [each for word in words for each in analysis.synonyms.get(word, ())]
    prefixes = [word for each in beginnings for word in analysis.words(each)]
    begins = [[word, *most_frequent(index.begins(word))[:EXPANDED]] for word in prefixes]
    steps: list[tuple[str, Sequence[str]]] = [("split", split(query.text).split()), ("lowercase", words)]
    steps += (
        [("typos", corrected)] * (corrected != words) + [("stem", stems)] + [("synonyms", same)] * bool(same)
    )
    steps += [("prefixes", [word for some in begins for word in some])] * bool(prefixes)
    must, never = ([analysis.terms(text) for text in texts] for texts in (phrases, excluded))
    if query.text.strip(" *") and not (words or prefixes or must or never):
        stems = [NO_TERM]  # signs alone find nothing
    return QueryPlan(
        [*([stem] for stem in stems), *map(analysis.terms, same)],
        [list({analysis.stem(word): None for word in some}) for some in begins],
        [phrase for phrase in must if phrase], [phrase for phrase in never if phrase], steps,
    )  # fmt: skip


def read_filters(texts: Sequence[str]) -> dict[str, FieldValue | tuple[float | None, float | None]]:
    """Return the filters of `FIELD=VALUE` (several of a field: one must fit) and `FIELD=LOW..HIGH`.

    Raises:
        QueryError: another form.
    """
    values, ranges = dict[str, list[str]](), dict[str, tuple[float | None, float | None]]()
    for text in texts:
        name, _, value = text.partition("=")
        low, dots, high = value.partition("..")
        try:
            if not (name and value):
                raise ValueError
            if dots:
                ranges[name] = float(low) if low else None, float(high) if high else None
            else:
                values.setdefault(name, []).append(value)
        except ValueError:
            raise QueryError(
                f"the filter {shorten(text)!r}", expected="language=en, or year=2001..2005"
            ) from None
    return {**values, **ranges}


def exact_values(name: str, value: Any) -> list[str]:
    """Return name, separator and value of each value of a field. Numbers are floats: 3 and 3.0 are one."""
    each = value if isinstance(value, list) else [value]
    return [f"{name}{SEPARATOR}{one if isinstance(one, str) else float(one)}" for one in each]


def wanted_values(name: str, value: Any) -> list[str]:
    """Return the exact values of which a filter admits one. A number may be given as its text."""
    found = exact_values(name, value)
    for one in value if isinstance(value, list) else [value]:
        try:
            found += exact_values(name, float(one))
        except ValueError:
            continue
    return found


def within_edits(a: str, b: str, edits: int) -> bool:
    """Return whether insertions, deletions, substitutions and swaps of neighbours, at most `edits`, lead from a to b."""
    before, last = list[int](), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            swap = before[j - 2] + 1 if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]) else edits + 1
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y), swap))
        before, last = last, row
    return last[-1] <= edits


def find_marks(text: str, stems: Collection[str], analysis: Analysis) -> list[tuple[int, int]]:
    """Return (begin, end) of the words of a text that have one of the stems."""
    found = []
    for match in WORD.finditer(text):
        begin = match.start()
        for part in split(match[0]).split():
            if analysis.stem(part) in stems:
                found.append((begin, begin + len(part)))
            begin += len(part)
    return found


def check_fields(query: SearchQuery, fields: Collection[str]) -> None:
    """Check the fields of a query. Raises QueryError: an unknown field, with the nearest one; no number ends a range."""
    for name in (*query.filters, *query.facets):
        if name not in fields:
            raise QueryError(
                f"no document has a field {shorten(name)!r}", expected=one_of(name, sorted(fields))
            )
    for name, value in query.filters.items():
        if isinstance(value, tuple) and not all(end is None or isfinite(end) for end in value):
            raise QueryError(f"{shorten(name)}: a range from {value[0]} to {value[1]}", expected="numbers")


def term_parts(node: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[str, float]:
    """Return term -> its part of a score. node: of Lucene's or tantivy's explanation; pattern: has its term as a group."""
    if match := pattern.search(" ".join([node["description"], *(node.get("context") or ())])):
        return {match[1]: node["value"]}
    found = dict[str, float]()
    for each in node.get("details") or ():
        for term, value in term_parts(each, pattern).items():
            found[term] = found.get(term, 0.0) + value
    return found
