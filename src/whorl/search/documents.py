"""Documents of a search index, queries, results and errors (`search/index.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from whorl.errors import DataError, WhorlError

Vectors = NDArray[np.float32]
FieldValue = str | int | float | list[str]
Encode = Callable[[list[str]], Vectors]
Mode = Literal["hybrid", "text", "vectors"]


class QueryError(DataError):
    """A query that cannot be answered: the place in it, or the field."""

    exit_code = 2


class IndexBusyError(WhorlError):
    """Another process writes this index."""


class IndexUnavailableError(WhorlError):
    """The server of the index does not answer. A write may be repeated."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document. start: its first character there. vectors: name of the encoder -> unit vector [d]."""

    start: int
    text: str
    vectors: Mapping[str, Vectors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchDocument:
    """A document as an index stores it. fields: texts are exact (filters, facets), numbers have ranges."""

    id: str
    version: int
    passages: Sequence[Passage]
    title: str = ""
    fields: Mapping[str, FieldValue] = field(default_factory=dict)
    digest: str = ""  # `content_digest` of the source; "" in `Index.versions` is a deletion


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A query.

    Attributes:
        text: words, "phrases in quotes", -excluded.
        filters: field -> a value; a list of which one must fit; a range (low, high), None for an open end.
        facets: fields whose values are counted.
        typos: words of 4 letters may differ by one edit, those of 8 by two. explain: with the terms of each score.
        marks: with the places of matches in each hit.
    """

    text: str
    k: int = 10
    mode: Mode = "hybrid"
    filters: Mapping[str, FieldValue | tuple[float | None, float | None]] = field(default_factory=dict)
    facets: Sequence[str] = ()
    typos: bool = True
    explain: bool = False
    marks: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.encode("utf-8", "replace").decode())  # no lone surrogates


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A passage that was found. marks: (begin, end) of matches in `text`. explanation: part of the score -> value."""

    id: str
    version: int
    score: float
    start: int
    text: str
    title: str = ""
    fields: Mapping[str, FieldValue] = field(default_factory=dict)
    marks: Sequence[tuple[int, int]] = ()
    explanation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchResults:
    """The best passages, at most one of each document; total: documents that fit. facets: field -> value -> documents."""

    hits: Sequence[SearchHit]
    total: int
    facets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def content_digest(title: str, text: str, fields: Mapping[str, FieldValue]) -> str:
    """Return a hash of the content of a document, for comparisons of an index with its source."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps([title, text, fields], option=orjson.OPT_SORT_KEYS))
