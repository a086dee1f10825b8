"""The interface of a search index: documents with external versions, atomic writes, queries by text and by vectors.

A document is cut into passages, which a query finds. Its version comes from outside: the offset of its record in the log.
An older version never replaces a newer one. A deletion keeps its version, so a late record does not revive the document.
The position, up to which the log has been read, is stored in the same write.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from whorl.errors import ConfigError, DataError, one_of, shorten
from whorl.registry import import_backend
from whorl.search.analysis import Analysis
from whorl.search.documents import (
    Encode,
    QueryError,
    SearchDocument,
    SearchHit,
    SearchQuery,
    SearchResults,
    Vectors,
)
from whorl.search.query import LONG, QueryPlan, check_fields, find_marks, plan_query, within_edits

RRF_K = 5  # 60 in the paper, for rankings of equal quality; 5 is better in bench/loop/search_quality.py
FUSED = 100  # documents of each side of a hybrid query
EMPTY: Mapping[str, Any] = {"position": {}, "names": [], "sizes": {}, "write": 0}
Facets = dict[str, dict[str, int]]
Latest = Mapping[str, tuple[int, SearchDocument | None]]  # id -> version and document (None: deleted)
# scheme -> class, and the extra that it needs
INDEXES = {
    "folder": ("whorl.search.embedded:EmbeddedIndex", ""),
    "postgresql": ("whorl.search.postgres:PostgresIndex", "postgres"),
    "opensearch": ("whorl.search.opensearch:OpenSearchIndex", "opensearch"),
}


class Index(ABC):
    """See the top of this file. One writer at a time; readers see the last write that is complete.

    url: a folder, or SERVER#NAME. For the other arguments see `open_index`.
    """

    def __init__(
        self, url: str, *, writable: bool, encode: Encode | None = None, encoder: str = "", analysis: Analysis
    ) -> None:  # fmt: skip
        self.url, _, name = url.partition("#")
        self.name = name or "whorl"
        self.writable, self.encode, self.encoder, self.analysis = writable, encode, encoder, analysis
        self._lock = threading.RLock()

    @abstractmethod
    def versions(self, ids: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Return id -> (version, digest) of those that are known; digest "" after a deletion."""

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, int, str]]:
        """Yield (id, version, digest) of all documents that are not deleted."""

    @abstractmethod
    def frequencies(self, stems: Sequence[str]) -> dict[str, int]:
        """Return how many passages have each stem."""

    @abstractmethod
    def similar(self, word: str, edits: int) -> Iterable[str]:
        """Return words of the index, among them frequent ones at so many edits from a word."""

    @abstractmethod
    def begins(self, prefix: str) -> Iterable[str]:
        """Return words that begin so."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the index, and close it."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the state, which has the keys of `EMPTY`. sizes: encoder -> length of its vectors."""

    @abstractmethod
    def _write(self, latest: Latest, state: dict[str, Any], expire: int) -> None: ...

    @abstractmethod
    def _by_text(self, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        """Return the n best documents by their best passage."""

    @abstractmethod
    def _by_vectors(self, vector: Vectors, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        """Return the n nearest documents that fit the filters, `must` and `never`."""

    @abstractmethod
    def _totals(self, plan: QueryPlan, query: SearchQuery) -> tuple[int, Facets]:
        """Return how many documents fit, and field -> value -> how many."""

    def write(
        self, puts: Sequence[SearchDocument], deletes: Sequence[tuple[str, int]] = (),
        position: Mapping[str, int] | None = None, expire: int = 0,
    ) -> None:  # fmt: skip
        """Put documents, delete (id, version), and set the position, all of it or nothing.

        Older versions are ignored; an equal one replaces (a new encoder). expire: deletions of lower versions are dropped,
        because no older record arrives any more. No offset of the position moves back.

        Raises:
            DataError: vectors of another length than earlier ones. IndexUnavailableError.
        """
        latest = dict[str, tuple[int, SearchDocument | None]]()
        for id_, version, put in [*((p.id, p.version, p) for p in puts), *((i, v, None) for i, v in deletes)]:
            if id_ not in latest or version >= latest[id_][0]:
                latest[id_] = version, put
        with self._lock:
            state = self._state()
            known = state["position"]
            moved = {place: max(n, known.get(place, 0)) for place, n in (position or {}).items()}
            state["position"] = {**known, **moved}
            state["names"] = sorted({*state["names"], *(name for put in puts for name in put.fields)})
            for name, vector in ((n, v) for put in puts for p in put.passages for n, v in p.vectors.items()):
                if vector.shape != (size := state["sizes"].setdefault(name, len(vector)),):
                    raise DataError(
                        f"vectors of the encoder {name!r} have the shape {list(vector.shape)}",
                        expected=f"[{size}], as those that the index has", do="name another encoder differently",
                    )  # fmt: skip
            self._write(latest, state | {"write": state["write"] + 1}, expire)

    def position(self) -> dict[str, int]:
        """Return "topic/partition" -> next offset."""
        with self._lock:
            return dict(self._state()["position"])

    def fields(self) -> list[str]:
        """Return the names of the fields that documents have, or had."""
        with self._lock:
            return list(self._state()["names"])

    def near(self, word: str) -> list[str]:
        """Return words at the smallest distance: one edit, or from `LONG` letters two. A swap of neighbours is one."""
        for edits in range(1, 3 if len(word) >= LONG else 2):
            some = [each for each in self.similar(word, edits) if abs(len(each) - len(word)) <= edits]
            if found := [each for each in some if within_edits(word, each, edits)]:
                return found
        return []

    def search(self, query: SearchQuery) -> SearchResults:
        """Return what fits best. Raises QueryError: an unknown field, with the nearest one."""
        with self._lock:
            return self._search(query)

    def _search(self, query: SearchQuery) -> SearchResults:
        state, plan = self._state(), plan_query(query, self.analysis, self)
        check_fields(query, state["names"])
        vector = None
        if self.encode and self.encoder in state["sizes"] and query.mode != "text" and plan.stems:
            vector = self.encode([query.text])[0]
            if vector.shape != (size := state["sizes"][self.encoder],):
                raise QueryError(
                    f"the encoder {self.encoder!r} makes vectors of the shape {list(vector.shape)}",
                    expected=f"[{size}], as those of the index", do="build the index again with this encoder",
                )  # fmt: skip
        elif query.mode == "vectors":
            raise QueryError(
                f"{shorten(query.text)!r} cannot be searched by vectors",
                expected="words, and an index with vectors of the encoder", do="search by text",
            )  # fmt: skip
        n = query.k if vector is None or query.mode == "vectors" else max(FUSED, query.k)
        sides, stems = dict[str, list[SearchHit]](), {*plan.stems}
        if query.mode != "vectors":
            sides["text"] = self._by_text(plan, query, n)
        if vector is not None:
            sides["vectors"] = self._by_vectors(vector, plan, query, n)
        if query.mode == "vectors":  # the nearest need not have a word of the query
            plan = replace(plan, should=(), begins=())
        total, facets = self._totals(plan, query)
        hits = _fused(sides, query) if len(sides) > 1 else next(iter(sides.values()))
        if query.marks:
            hits = [replace(hit, marks=find_marks(hit.text, stems, self.analysis)) for hit in hits]
        return SearchResults(hits, max(total, len(hits)), facets)

    def analyze(self, text: str) -> Sequence[tuple[str, Sequence[str]]]:
        """Return (step, its result) of the analysis of a query, for display."""
        with self._lock:
            return plan_query(SearchQuery(text), self.analysis, self).steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_index(
    url: str | Path, *, writable: bool = False, encode: Encode | None = None, encoder: str = "",
    analysis: Analysis | None = None,
) -> Index:  # fmt: skip
    """Return an index, which is made if it is writable and does not exist.

    Args:
        url: path of a folder, postgresql://... or opensearch://...
        encode: texts of queries -> unit vectors [N, d]; None searches text alone.
        encoder: name of the vectors in passages that `encode` belongs to.
        analysis: of texts and queries; the default is English without synonyms.

    Raises:
        ConfigError: there is no index, no such scheme, or its client is not installed.
        IndexBusyError: another process writes it.
    """
    scheme = index_scheme(str(url))
    opened: Index = import_backend(scheme, *INDEXES[scheme])(
        str(url), writable=writable, encode=encode, encoder=encoder, analysis=analysis or Analysis()
    )
    return opened


def index_scheme(url: str) -> str:
    """Return the key of `INDEXES`. Raises ConfigError: neither a folder nor a known URL."""
    scheme = urlsplit(url).scheme if "://" in url else "folder"
    if scheme not in INDEXES:
        raise ConfigError(f"the index {url!r} begins with {scheme!r}", expected=one_of(scheme, [*INDEXES]))
    return scheme


def remove_index(url: str | Path) -> None:
    """Delete an index, if it exists."""
    with suppress(ConfigError):
        open_index(url).remove()


def _fused(sides: Mapping[str, list[SearchHit]], query: SearchQuery) -> list[SearchHit]:
    """Return the best hits by reciprocal rank fusion: the sum of 1 / (`RRF_K` + rank) over both sides, ranks from 1.

    Cormack, Clarke and Buettcher 2009, doi:10.1145/1571941.1572114. Equal scores keep the order of the first side.
    """
    parts = dict[str, dict[str, float]]()
    for name, hits in sides.items():
        for rank, hit in enumerate(hits, 1):
            parts.setdefault(hit.id, {})[name] = 1 / (RRF_K + rank)
    best = {hit.id: hit for hit in (*sides["vectors"], *sides["text"])}  # the passage that has the words
    found = []
    for id_ in sorted(parts, key=lambda each: -sum(parts[each].values()))[: query.k]:
        terms = {f"bm25 {term}": value for term, value in best[id_].explanation.items()}
        explanation = parts[id_] | terms if query.explain else {}
        found.append(replace(best[id_], score=sum(parts[id_].values()), explanation=explanation))
    return found
