"""The text side of the embedded index: its schema, and a query as tantivy's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import reduce
from typing import Any

import orjson
import tantivy
from tantivy import Occur

from whorl.search.documents import FieldValue, SearchQuery
from whorl.search.query import Phrase, QueryPlan, term_parts

Q = tantivy.Query
EXACT = 10_000
FACET_VALUES = 100  # at most, the most frequent ones
_TERM = re.compile(r'type=Str, "(.*)"')


def make_schema() -> tantivy.Schema:
    """Return the schema. terms: stems of title and text. words: without stems, for typos and prefixes."""
    builder = tantivy.SchemaBuilder()
    for name in ("kind", "id"):
        builder.add_text_field(name, tokenizer_name="raw", index_option="basic")
    builder.add_integer_field("version", indexed=True, fast=True)
    builder.add_unsigned_field("doc", fast=True)
    builder.add_unsigned_field("row", indexed=True, fast=True)
    builder.add_text_field("terms", tokenizer_name="terms")
    builder.add_text_field("words", tokenizer_name="words", index_option="basic")
    builder.add_json_field("fields", tokenizer_name="raw", fast=True, index_option="basic")
    builder.add_bytes_field("stored", stored=True)
    return builder.build()


def tantivy_fields(fields: Mapping[str, FieldValue]) -> dict[str, Any]:
    """Return fields as they are indexed: all numbers are floats, so that 3 and 3.0 are one value."""
    return {_key(name): float(v) if isinstance(v, int | float) else v for name, v in fields.items()}


def _key(name: str) -> str:
    """Return the name of a field in tantivy, where a dot separates names."""
    return name.replace(".", "\u2024")


class TextQuery:
    """The query of a plan for one searcher.

    Attributes:
        query: of tantivy. everything: without its words, which vectors must fit too; filtered: it is less than all passages.
        passages: how many fit, once that is known.
    """

    def __init__(
        self, index: tantivy.Index, searcher: tantivy.Searcher, plan: QueryPlan, query: SearchQuery
    ) -> None:
        self._index, self._searcher, self._schema, self.plan = index, searcher, index.schema, plan
        self.passages: int | None = None
        should = [*map(self._phrase, plan.should), *map(self._any, plan.begins)]
        must = [(Occur.Must, self._phrase(phrase)) for phrase in plan.must]
        filters = [
            (Occur.Must, Q.const_score_query(self._filter(name, value), 0.0))
            for name, value in query.filters.items()
        ]
        others = [*must, *filters, *((Occur.MustNot, self._phrase(phrase)) for phrase in plan.never)]
        self.filtered = bool(others)
        if must or filters:  # only passages have terms and fields
            self.everything = Q.boolean_query(others)
        else:
            passages = Q.term_set_query(self._schema, "kind", ["head", "passage"])
            self.everything = Q.boolean_query([(Occur.Must, passages), *others])
        optional = [(Occur.Should, clause) for clause in should]
        if not should and not must:
            self.query = self.everything
        elif others and should and not must:
            self.query = Q.boolean_query([(Occur.Must, Q.boolean_query(optional)), *others])
        else:
            self.query = Q.boolean_query([*optional, *others])

    def _phrase(self, stems: Phrase) -> tantivy.Query:
        if len(stems) > 1:
            return Q.phrase_query(self._schema, "terms", list(stems))
        return Q.term_query(self._schema, "terms", stems[0], "freq") if stems else Q.empty_query()

    def _any(self, stems: Sequence[str]) -> tantivy.Query:
        return Q.disjunction_max_query([self._phrase([stem]) for stem in stems])

    def _filter(self, name: str, value: Any) -> tantivy.Query:
        """Return documents with a value, one of several, or a range. A number may be given as its text."""
        path = f"fields.{_key(name)}"
        if isinstance(value, tuple):
            # tantivy's parser takes no exponent of a negative number, and a range with one whole end panics.
            escaped = re.sub(r"[^\w.]", r"\\\g<0>", path)
            low, high = (None if end is None else f"{Decimal(float(end)):f}" for end in value)
            if low is None and high is None:
                low = "-1" + 308 * "0"
            parts = [f"[{low} TO *]"] * (low is not None) + [f"[* TO {high}]"] * (high is not None)
            return self._index.parse_query(" AND ".join(f"{escaped}:{part}" for part in parts))
        found = []
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                found.append(Q.term_query(self._schema, path, each))
            try:
                found.append(Q.term_query(self._schema, path, float(each)))
            except ValueError:
                continue
        return reduce(lambda a, b: a.or_should_match(b), found) if found else Q.empty_query()

    def totals(self, names: Sequence[str], one_each: bool) -> tuple[int, dict[str, dict[str, int]]]:
        """Return how many documents fit, and field -> value -> how many. Beyond `EXACT` passages these are estimates.

        one_each: no document has several passages.
        """
        if (passages := self.passages) is None:
            counted: Any = self._searcher.search(self.query, limit=1)
            passages = int(counted.count)
        if one_each and not names:
            return passages, {}
        few = passages <= EXACT
        distinct = {"terms": {"field": "doc", "size": EXACT}} if few else {"cardinality": {"field": "doc"}}
        wanted: dict[str, Any] = {
            f"of {name}": {
                "terms": {"field": f"fields.{_key(name)}", "size": FACET_VALUES},
                "aggs": {"documents": distinct},
            }
            for name in names
        }
        found = self._searcher.aggregate(self.query, {"documents": distinct, **wanted})

        def documents(node: Any) -> int:
            each = node["documents"]
            return len(each["buckets"]) if few else round(each["value"])

        facets = {n: {str(b["key"]): documents(b) for b in found[f"of {n}"]["buckets"]} for n in names}
        return documents(found), facets

    def explain(self, address: tantivy.DocAddress) -> dict[str, float]:
        """Return term -> its part of the score (BM25)."""
        return term_parts(orjson.loads(self.query.explain(self._searcher, address).to_json()), _TERM)
