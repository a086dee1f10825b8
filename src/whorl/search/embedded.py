"""The embedded index: one folder, one commit of tantivy for text, vectors and position.

Each passage is a document of tantivy. Further ones hold a deletion (its version) and the manifest: the position, the names
of fields, and the files of vectors. A commit replaces tantivy's list of segments in one step, so the manifest changes with
the texts that belong to it, and a kill at any moment leaves the last commit. Vectors are written before the commit
(`search/vectors.py`).
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tantivy

from whorl.errors import ConfigError
from whorl.search import index
from whorl.search.analysis import split
from whorl.search.documents import IndexBusyError, Passage, SearchDocument, SearchHit, SearchQuery, Vectors
from whorl.search.index import Facets, Index, Latest
from whorl.search.query import EXPANDED, QueryPlan
from whorl.search.text import EXACT, Q, TextQuery, make_schema, tantivy_fields
from whorl.search.vectors import SPARSE, Entry, Rows, VectorFile, append, remove_unused

HEAP = 64_000_000  # bytes of the writer's buffer
CHUNK = 1000  # ids of one look-up
# rows: the next one. several: a document has more than one passage. vectors: encoder -> file
EMPTY: Mapping[str, Any] = {**index.EMPTY, "rows": 0, "several": False, "vectors": {}}
Found = list[tuple[float, tantivy.DocAddress]]


@dataclass
class _Batch:
    """The additions of a write. rows: the next row."""

    rows: int
    vectors: dict[str, list[tuple[int, Vectors]]] = field(default_factory=lambda: defaultdict(list))


class EmbeddedIndex(Index):
    """See the top of this file, and `open_index` for the arguments. Readers see each commit at their next call."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.folder = Path(url)
        self._meta = self.folder / "meta.json"
        if self.writable:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not self._meta.is_file():
            raise ConfigError(
                f"there is no index in {url}", do="make it with `whorl watch` or `whorl search`"
            )
        self._tantivy = tantivy.Index(make_schema(), path=url)
        self._tantivy.config_reader("manual")
        self._tantivy.register_tokenizer("terms", self.analysis.stemmer)
        self._tantivy.register_tokenizer("words", self.analysis.plain)
        self._writer = self._open_writer() if self.writable else None
        self._builder = ThreadPoolExecutor(1, "vectors")
        self._building: Future[None] | None = None
        self._seen: tuple[int, int] = (0, 0)
        self._searcher: tantivy.Searcher
        self._manifest: Mapping[str, Any] = EMPTY
        self._text: TextQuery | None = None
        self._vectors: dict[str, VectorFile] = {}
        self._refresh()

    def _open_writer(self) -> tantivy.IndexWriter:
        try:
            return self._tantivy.writer(HEAP, 1)
        except ValueError as error:
            if "LockBusy" not in str(error):
                raise
            raise IndexBusyError(
                f"another process writes the index {self.folder}", do="search it, or end that process first"
            ) from error

    def _refresh(self) -> tantivy.Searcher:
        """Return a searcher of the last commit."""
        while True:
            stat = self._meta.stat()
            if (stat.st_mtime_ns, stat.st_ino) == self._seen:
                return self._searcher
            self._tantivy.reload()
            self._frequencies: dict[str, int] = {}
            self._searcher = self._tantivy.searcher()
            found = self._searcher.search(self._kind("manifest"), limit=1).hits
            self._manifest = self._stored(found[0][1]) if found else EMPTY
            with suppress(FileNotFoundError):  # a newer commit has others
                sizes, opened = self._manifest["sizes"], self._vectors
                self._vectors = {
                    name: VectorFile(self.folder, entry, sizes[name], opened.get(name))
                    for name, entry in self._manifest["vectors"].items()
                }
                self._seen = (stat.st_mtime_ns, stat.st_ino)

    def _kind(self, *kinds: str) -> tantivy.Query:
        return Q.term_set_query(self._tantivy.schema, "kind", kinds)

    def _stored(self, address: tantivy.DocAddress) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self._searcher.doc(address).get_first("stored"))  # type: ignore[arg-type]
        return found

    # -- writing -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        self._refresh()
        return {**self._manifest, "sizes": {**self._manifest["sizes"]}}

    def _write(self, latest: Latest, state: dict[str, Any], expire: int) -> None:
        assert self._writer is not None, "the index was opened for reading"
        known, batch = self.versions(list(latest)), _Batch(state["rows"])
        try:
            for id_, (version, document) in latest.items():
                if id_ in known:
                    if known[id_][0] > version:
                        continue
                    self._writer.delete_documents_by_term("id", id_)
                if document is None:
                    self._add("deleted", id_, version, {"id": id_, "version": version, "digest": ""})
                else:
                    self._put(document, batch)
                    state["several"] |= len(document.passages) > 1
            if expire:
                old = Q.range_query(
                    self._tantivy.schema, "version", tantivy.FieldType.Integer, None, expire - 1
                )
                self._writer.delete_documents_by_query(self._kind("deleted").and_must_match(old))
            self._writer.delete_documents_by_term("kind", "manifest")
            self._add(
                "manifest", "", 0, {**state, "rows": batch.rows, "vectors": self._add_vectors(batch.vectors)}
            )
            self._writer.commit()
        except BaseException:
            self._writer.rollback()
            raise
        self._refresh()
        if batch.vectors:
            remove_unused(self.folder, self._vectors.values())
        for file in self._vectors.values():
            if file.has_grown and (self._building is None or self._building.done()):
                self._building = self._builder.submit(file.build_index)

    def _put(self, document: SearchDocument, batch: _Batch) -> None:
        """Add the passages of a document."""
        head = {
            "id": document.id, "version": document.version, "title": document.title, "fields": document.fields,
            "digest": document.digest,
        }  # fmt: skip
        fields, first = tantivy_fields(document.fields), batch.rows
        for passage in document.passages or [Passage(0, "")]:
            stored = {**head, "start": passage.start, "text": passage.text}
            text = split(
                f"{document.title}\n{document.title}\n{passage.text}"
            )  # words of the title count twice
            self._add(
                "head" if batch.rows == first else "passage", document.id, document.version, stored,
                doc=first, row=batch.rows, terms=text, words=text, fields=fields,
            )  # fmt: skip
            for encoder, vector in passage.vectors.items():
                batch.vectors[encoder].append((batch.rows, vector))
            batch.rows += 1

    def _add(self, kind: str, id_: str, version: int, stored: Mapping[str, Any], **more: Any) -> None:
        """Add a document of tantivy."""
        values = {"kind": kind, "id": id_, "version": version, "stored": orjson.dumps(stored), **more}
        assert self._writer is not None
        self._writer.add_document(tantivy.Document.from_dict(values, self._tantivy.schema))

    def _add_vectors(self, added: Mapping[str, list[tuple[int, Vectors]]]) -> dict[str, Entry]:
        """Write new vectors; return the file of each encoder."""
        entries, passages = {**self._manifest["vectors"]}, self._kind("head", "passage")
        for name, pairs in added.items():
            rows, vectors = (np.array(each) for each in zip(*pairs, strict=True))
            file = self._vectors.get(name)
            is_sparse = file is not None and len(file.rows) > max(SPARSE, 2 * self._count(passages))
            alive = self._rows(passages) if is_sparse else None
            entries[name] = append(self.folder, file, rows, vectors, alive)
        return entries

    def _count(self, query: tantivy.Query) -> int:
        found: Any = self._searcher.search(query, limit=1)
        return int(found.count)

    def _rows(self, query: tantivy.Query) -> Rows:
        """Return the sorted rows of the passages that a query finds."""
        found = self._searcher.search(query, limit=max(1, self._searcher.num_docs), count=False).hits
        return np.sort(
            np.array(self._searcher.fast_field_values("row", [address for _, address in found]), np.int64)
        )

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.wait_merging_threads()
            self._writer = None
        self._builder.shutdown()

    # -- reading -------------------------------------------------------------------------------------------------------

    def versions(self, ids: Sequence[str]) -> dict[str, tuple[int, str]]:
        found = {}
        with self._lock:
            self._refresh()
            for first in range(0, len(ids), CHUNK):
                chosen = Q.term_set_query(self._tantivy.schema, "id", ids[first : first + CHUNK])
                query = chosen.and_must_match(self._kind("head", "deleted"))
                for _, address in self._searcher.search(query, limit=CHUNK, count=False).hits:
                    stored = self._stored(address)
                    found[stored["id"]] = stored["version"], stored["digest"]
        return found

    def documents(self) -> Iterator[tuple[str, int, str]]:
        searcher = self._refresh()
        heads = searcher.search(self._kind("head"), limit=max(1, searcher.num_docs), count=False)
        for _, address in heads.hits:
            stored = orjson.loads(searcher.doc(address).get_first("stored"))  # type: ignore[arg-type]
            yield stored["id"], stored["version"], stored["digest"]

    def frequencies(self, stems: Sequence[str]) -> dict[str, int]:
        searcher, known = self._refresh(), self._frequencies
        for stem in stems:
            if stem not in known:
                known[stem] = searcher.doc_freq("terms", stem)
        return known

    def similar(self, word: str, edits: int) -> set[str]:
        query = Q.fuzzy_term_query(self._tantivy.schema, "words", word, edits)
        stored = [
            self._stored(at) for _, at in self._searcher.search(query, limit=EXPANDED, count=False).hits
        ]
        return {each for one in stored for each in self.analysis.words(f"{one['title']} {one['text']}")}

    def begins(self, prefix: str) -> list[str]:
        return [word for word, _ in self._searcher.terms_with_prefix("words", prefix, limit=EXPANDED)]

    def _planned(self, plan: QueryPlan, query: SearchQuery) -> TextQuery:
        """Return the query of a plan, made once."""
        if self._text is None or self._text.plan is not plan:
            self._text = TextQuery(self._tantivy, self._searcher, plan, query)
        return self._text

    def _by_text(self, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        text, limit = self._planned(plan, query), 2 * n if self._manifest["several"] else n
        while True:
            found: Any = self._searcher.search(text.query, limit=limit)
            text.passages, hits = found.count, found.hits
            best = self._best(hits, n, text if query.explain else None)
            if len(best) >= n or len(hits) < limit:
                return best
            limit *= 4

    def _by_vectors(self, vector: Vectors, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        """Return the nearest documents that fit the filters, `must` and `never`.

        The passages that a narrow filter admits are compared one by one. Otherwise the nearest are taken until enough of
        them fit, which the text index decides: deleted ones are none of them.
        """
        text, vectors, rows = self._planned(plan, query), self._vectors[self.encoder], None
        if text.filtered and self._count(text.everything) <= EXACT:
            rows = self._rows(text.everything)
        limit = 2 * n
        while True:
            nearest = vectors.nearest(vector, limit, rows)
            chosen = Q.term_set_query(self._tantivy.schema, "row", [row for row, _ in nearest])
            if text.filtered:
                chosen = chosen.and_must_match(text.everything)
            fit = self._searcher.search(chosen, limit=limit, count=False).hits
            addresses = [address for _, address in fit]
            at = dict(zip(self._searcher.fast_field_values("row", addresses), addresses, strict=True))
            best = self._best([(cosine, at[row]) for row, cosine in nearest if row in at], n)
            if len(best) >= n or len(nearest) < limit:
                return best
            limit *= 4

    def _best(self, found: Found, n: int, explained: TextQuery | None = None) -> list[SearchHit]:
        """Return the n first documents at their first passage."""
        docs = self._searcher.fast_field_values("doc", [address for _, address in found])
        best: dict[Any, tuple[float, tantivy.DocAddress]] = {}
        for doc, each in zip(docs, found, strict=True):
            best.setdefault(doc, each)
        hits = []
        for score, address in list(best.values())[:n]:
            stored = self._stored(address)
            del stored["digest"]
            parts = explained.explain(address) if explained else {}
            hits.append(SearchHit(score=score, explanation=parts, **stored))
        return hits

    def _totals(self, plan: QueryPlan, query: SearchQuery) -> tuple[int, Facets]:
        return self._planned(plan, query).totals(query.facets, not self._manifest["several"])
