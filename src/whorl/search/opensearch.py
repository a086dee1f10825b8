"""An index behind OpenSearch's API: `opensearch://[USER:PASSWORD@]HOST:PORT#NAME`, with `?tls` before the # for HTTPS.

Each passage is a document of the server with the version of its document (`external_gte`). A deletion is a document too: the
server drops its own tombstones after a minute. A write is one bulk request, whose last item is the state, and a refresh;
readers see the write before until then. If the server dies within it, a part may stay until the write is repeated.

Vectors are stored there and searched here, exactly: a reader keeps those of its encoder in memory.
"""

from __future__ import annotations

import re
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import opensearchpy
import xxhash

from whorl.errors import ConfigError, DataError, shorten
from whorl.search.documents import (
    IndexBusyError,
    IndexUnavailableError,
    Passage,
    SearchDocument,
    SearchHit,
    SearchQuery,
    Vectors,
)  # fmt: skip
from whorl.search.index import EMPTY, Facets, Index, Latest
from whorl.search.query import (
    EXPANDED,
    GAP,
    SEPARATOR,
    Phrase,
    QueryPlan,
    exact_values,
    term_parts,
    wanted_values,
)
from whorl.search.text import FACET_VALUES

PAGE = 1000
CONFLICT = 409  # status: of an older version
T = TypeVar("T")
_KEYWORD, _STORED = {"type": "keyword"}, {"type": "object", "enabled": False}
_TERMS = {"type": "text", "analyzer": "whitespace", "position_increment_gap": GAP}
_INDEX = {
    "settings": {"index": {"number_of_shards": 1, "refresh_interval": -1}},
    "mappings": {
        "dynamic": False,
        "properties": {
            "kind": _KEYWORD, "doc": _KEYWORD, "key": _KEYWORD, "version": {"type": "long"}, "first": {"type": "boolean"},
            "terms": _TERMS, "words": _TERMS, "exact": _KEYWORD, "encoders": _KEYWORD, "write": {"type": "long"},
            "numbers": {"type": "object", "dynamic": True}, "stored": _STORED,
        },
    },
}  # fmt: skip
_PART = re.compile(r"(?:terms|words):([^\s)^]+)")


class OpenSearchIndex(Index):
    """See the top of this file. A new writer takes over: the next write of an older one raises IndexBusyError."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        place, _, tls = self.url.removeprefix("opensearch://").partition("?")
        self._client = opensearchpy.OpenSearch([f"http{'s' * (tls == 'tls')}://{place}"], timeout=60)
        self._index = "whorl-" + re.sub(r"[^a-z0-9_.-]", "-", self.name.lower())
        self._keys, self._matrix, self._loaded = list[str](), np.empty((0, 0), np.float32), -1
        self._token = uuid.uuid4().hex
        if not self._call(self._client.indices.exists, index=self._index):
            if not self.writable:
                raise ConfigError(f"{self.url} has no index {self.name!r}", do="make it with `whorl watch`")
            self._call(self._client.indices.create, index=self._index, body=_INDEX)
        if self.writable:
            body = {"kind": "writer", "token": self._token}
            self._call(self._client.index, index=self._index, id="writer", body=body)

    def _call(self, request: Callable[..., T], **options: Any) -> T:
        try:
            return request(**options)
        except opensearchpy.exceptions.ConnectionError as error:
            raise IndexUnavailableError(f"{self.url}: {error}", expected="a server that answers") from error
        except opensearchpy.exceptions.TransportError as error:
            raise DataError(
                f"{self.url}: {shorten(str(error))}", expected="a request that OpenSearch takes"
            ) from error

    def _get(self, *keys: str) -> dict[str, dict[str, Any]]:
        """Return the documents of the server that exist, by their key."""
        if not keys:
            return {}
        found: Any = self._call(self._client.mget, index=self._index, body={"ids": keys})
        return {each["_id"]: each["_source"] for each in found["docs"] if each.get("found")}

    def _state(self) -> dict[str, Any]:
        return {**EMPTY, "position": {}, "sizes": {}, **self._get("state").get("state", {}).get("stored", {})}

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, latest: Latest, state: dict[str, Any], expire: int) -> None:
        heads, body = self._get("writer", *map(_key, latest)), list[dict[str, Any]]()
        if heads.pop("writer", {}).get("token") != self._token:
            raise self._busy()

        def add(action: str, key: str, version: int, *source: dict[str, Any]) -> None:
            body.extend([{action: {"_id": key, "version": version, "version_type": "external_gte"}}, *source])

        for id_, (version, document) in latest.items():
            head = heads.get(_key(id_), {"version": -1, "stored": {"passages": 0}})
            if version >= head["version"]:
                sources = self._sources(id_, version, document, state["write"])
                for source in sources:
                    add("index", source["key"], version, source)
                for number in range(len(sources), head["stored"]["passages"]):
                    add("delete", _key(id_, number), version)
        add("index", "state", state["write"], {"kind": "state", "stored": state})
        done: Any = self._call(self._client.bulk, index=self._index, body=body)
        failed = [r for each in done["items"] for r in each.values() if "error" in r]
        if any(r["status"] == CONFLICT and r["_id"] == "state" for r in failed):
            raise self._busy()
        if failed := [r for r in failed if r["status"] != CONFLICT]:  # the server has a newer version
            problem = f"{self.url}: {shorten(str(failed[0]['error']))}"
            raise DataError(problem, expected="a document that OpenSearch takes")
        self._call(self._client.indices.refresh, index=self._index)
        if expire:
            old = [{"term": {"kind": "deleted"}}, {"range": {"version": {"lt": expire}}}]
            query = {"query": {"bool": {"filter": old}}}
            self._call(
                self._client.delete_by_query, index=self._index, body=query, params={"refresh": "true"}
            )

    def _busy(self) -> IndexBusyError:
        return IndexBusyError(f"another process writes the index {self.name} in {self.url}", do="search it")

    def _sources(
        self, id_: str, version: int, document: SearchDocument | None, write: int
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return what the server stores of a document."""
        head = {"doc": id_, "version": version, "write": write}
        if document is None:
            stored = {"digest": "", "passages": 1}
            return [{**head, "kind": "deleted", "key": _key(id_), "first": True, "stored": stored}]
        exact = [each for name, value in document.fields.items() for each in exact_values(name, value)]
        numbers = {_number(n): float(v) for n, v in document.fields.items() if isinstance(v, int | float)}
        passages, made = document.passages or [Passage(0, "")], []
        for number, passage in enumerate(passages):
            texts = [text for text in (document.title, passage.text) if text]
            stored = {
                "digest": document.digest, "passages": len(passages), "title": document.title, "start": passage.start,
                "text": passage.text, "fields": document.fields,
                "vectors": {n: b64encode(v.astype("<f4").tobytes()).decode() for n, v in passage.vectors.items()},
            }  # fmt: skip
            source = {
                **head, "kind": "passage", "key": _key(id_, number), "first": number == 0, "exact": exact,
                "terms": [" ".join(self.analysis.terms(text)) for text in texts],
                "words": [" ".join(self.analysis.words(text)) for text in texts],
                "numbers": numbers, "encoders": [*passage.vectors], "stored": stored,
            }  # fmt: skip
            made.append(source)
        return made

    def versions(self, ids: Sequence[str]) -> dict[str, tuple[int, str]]:
        found = dict[str, tuple[int, str]]()
        for start in range(0, len(ids), PAGE):
            heads = self._get(*map(_key, ids[start : start + PAGE]))
            found |= {h["doc"]: (h["version"], h["stored"]["digest"]) for h in heads.values()}
        return found

    def documents(self) -> Iterator[tuple[str, int, str]]:
        for source in self._scan([{"term": {"kind": "passage"}}, {"term": {"first": True}}]):
            yield source["doc"], source["version"], source["stored"]["digest"]

    def _scan(self, filters: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield all documents of the server that fit, by their key."""
        body = {"query": {"bool": {"filter": filters}}, "sort": [{"key": "asc"}], "size": PAGE}
        while True:
            found: Any = self._call(self._client.search, index=self._index, body=body)
            hits = found["hits"]["hits"]
            yield from (hit["_source"] for hit in hits)
            if len(hits) < PAGE:
                return
            body["search_after"] = hits[-1]["sort"]

    def remove(self) -> None:
        self._call(self._client.indices.delete, index=self._index)
        self.close()

    def close(self) -> None:
        self._client.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def frequencies(self, stems: Sequence[str]) -> dict[str, int]:
        filters = {str(n): {"term": {"terms": stem}} for n, stem in enumerate(stems)}
        found = self._searched({"match_all": {}}, size=0, aggs={"terms": {"filters": {"filters": filters}}})
        counts = found["aggregations"]["terms"]["buckets"]
        return {stem: counts[str(n)]["doc_count"] for n, stem in enumerate(stems)}

    def similar(self, word: str, edits: int) -> set[str]:
        return self._words({"fuzzy": {"words": {"value": word, "fuzziness": edits}}})

    def begins(self, prefix: str) -> list[str]:
        found = self._words({"prefix": {"words": {"value": prefix}}})
        return [word for word in found if word.startswith(prefix)]

    def _words(self, query: dict[str, Any]) -> set[str]:
        """Return the words of the first passages that fit."""
        hits = self._searched(query, size=EXPANDED, _source=["words"])["hits"]["hits"]
        return {word for hit in hits for text in hit["_source"]["words"] for word in text.split()}

    def _searched(self, query: Any, **more: Any) -> Any:
        return self._call(self._client.search, index=self._index, body={"query": query, **more})

    def _query(self, plan: QueryPlan, query: SearchQuery) -> dict[str, Any]:
        filters: list[Any] = [{"term": {"kind": "passage"}}]
        for name, value in query.filters.items():
            if isinstance(value, tuple):
                ends = {end: v for end, v in zip(("gte", "lte"), value, strict=True) if v is not None}
                filters.append({"range": {f"numbers.{_number(name)}": ends}})
            else:
                filters.append({"terms": {"exact": wanted_values(name, value)}})
        should, must, never = ([_clause(c) for c in some] for some in (plan.some, plan.must, plan.never))
        least = int(bool(should) and not must)
        parts = {
            "should": should,
            "must": must,
            "must_not": never,
            "filter": filters,
            "minimum_should_match": least,
        }
        return {"bool": parts}

    def _by_text(self, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        order = [{"_score": "desc"}, {"doc": "asc"}]
        options: dict[str, Any] = {
            "size": n,
            "collapse": {"field": "doc"},
            "sort": order,
            "track_scores": True,
        }
        found = self._searched(self._query(plan, query), explain=query.explain, **options)
        return [_hit(hit["_source"], hit["_score"], hit.get("_explanation")) for hit in found["hits"]["hits"]]

    def _by_vectors(self, vector: Vectors, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        """Compare more passages until enough fit, which the server decides: deleted ones are none of them."""
        self._load_vectors(len(vector))
        cosines = self._matrix @ vector
        order, limit = np.argsort(-cosines, kind="stable"), 4 * n
        fit = self._query(replace(plan, should=(), begins=()), query)
        best, seen = dict[str, SearchHit](), 0
        while seen < len(order) and len(best) < n:
            some = {self._keys[row]: float(cosines[row]) for row in order[seen : seen + limit]}
            fit["bool"]["filter"] = [*fit["bool"]["filter"], {"terms": {"key": [*some]}}]
            found = self._searched(fit, size=len(some))["hits"]["hits"]
            fit["bool"]["filter"].pop()
            sources = {hit["_source"]["key"]: hit["_source"] for hit in found}
            for key in some:
                if key in sources:
                    best.setdefault(sources[key]["doc"], _hit(sources[key], some[key]))
            seen, limit = seen + limit, min(PAGE, 4 * limit)
        return [*best.values()][:n]

    def _load_vectors(self, size: int) -> None:
        """Read the vectors that were written since the last call."""
        if (write := self._state()["write"]) == self._loaded:
            return
        filters = [{"term": {"encoders": self.encoder}}, {"range": {"write": {"gt": self._loaded}}}]
        known = dict(zip(self._keys, self._matrix, strict=True))
        for source in self._scan(filters):
            known[source["key"]] = np.frombuffer(b64decode(source["stored"]["vectors"][self.encoder]), "<f4")
        self._keys, self._loaded = [*known], write
        self._matrix = np.stack([*known.values()]) if known else np.empty((0, size), np.float32)

    def _totals(self, plan: QueryPlan, query: SearchQuery) -> tuple[int, Facets]:
        distinct = {"documents": {"cardinality": {"field": "doc", "precision_threshold": 40_000}}}
        each = {"field": "exact", "size": FACET_VALUES}
        facets: dict[str, Any] = {
            str(i): {"terms": {**each, "include": re.escape(name + SEPARATOR) + ".*"}, "aggs": distinct}
            for i, name in enumerate(query.facets)
        }
        found = self._searched(self._query(plan, query), size=0, aggs=distinct | facets)["aggregations"]
        return found["documents"]["value"], {
            name: {b["key"][len(name) + 1 :]: b["documents"]["value"] for b in found[str(i)]["buckets"]}
            for i, name in enumerate(query.facets)
        }


def _key(id_: str, number: int = 0) -> str:
    return f"{xxhash.xxh3_128_hexdigest(id_.encode())}/{number}"  # a key has at most 512 bytes


def _number(name: str) -> str:
    return xxhash.xxh3_64_hexdigest(name.encode())  # a dot in a name would make an object


def _clause(phrase: Phrase) -> dict[str, Any]:
    if len(phrase) == 1:
        return {"term": {"terms": {"value": phrase[0]}}}
    return {"match_phrase": {"terms": {"query": " ".join(phrase)}}}


def _hit(source: Mapping[str, Any], score: float, explained: Any = None) -> SearchHit:
    stored, parts = source["stored"], term_parts(explained, _PART) if explained else {}
    place = stored["start"], stored["text"], stored["title"], stored["fields"]
    return SearchHit(source["doc"], source["version"], score, *place, explanation=parts)
