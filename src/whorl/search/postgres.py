"""An index in PostgreSQL: one schema, `postgresql://HOST/DATABASE#NAME`.

    text        tsvector of our terms, BM25 (below); words with typos by pg_trgm; without it every word is compared
    vectors     pgvector: HNSW, or exactly under a filter
    a write     is one transaction; one writer holds an advisory lock

BM25 needs the frequency n of a term. `ts_rank` of one term with unit weights is 6 / pi^2 sum(1 / i^2, i = 1..n),
which is near 1 - 6 / (pi^2 (n + 1/2)). So n is round(6 / (pi^2 (1 - rank)) - 1/2), without reading positions in SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log
from typing import Any

import orjson
import psycopg
from psycopg.sql import SQL, Identifier, Literal

from whorl.errors import ConfigError
from whorl.search.documents import (
    IndexBusyError,
    IndexUnavailableError,
    Passage,
    SearchDocument,
    SearchHit,
    SearchQuery,
    SearchResults,
    Vectors,
)  # fmt: skip
from whorl.search.index import EMPTY, Facets, Index, Latest
from whorl.search.query import GAP, SEPARATOR, Phrase, QueryPlan, exact_values, wanted_values
from whorl.search.text import FACET_VALUES

K1, B = 1.2, 0.75  # of BM25
HNSW_SIZE = 2000  # dimensions that pgvector's index takes
EXTENSIONS = {
    "vector": """CREATE TABLE vectors (encoder text, id text COLLATE "C", start int, vector vector,
        PRIMARY KEY (encoder, id, start))""",
    "pg_trgm": "CREATE INDEX ON words USING gin (word gin_trgm_ops)",
}
_SCHEMA = """
CREATE TABLE state (state jsonb);
CREATE TABLE passages (id text COLLATE "C", start int, version bigint, digest text, title text, fields jsonb, exact text[],
    text text, terms tsvector, length int, PRIMARY KEY (id, start));
CREATE INDEX ON passages USING gin (terms);
CREATE INDEX ON passages USING gin (exact);
CREATE INDEX ON passages (version) WHERE text IS NULL;
CREATE TABLE words (word text COLLATE "C" PRIMARY KEY);
"""  # a passage without a text is the version of a deleted document
_INSERT = "INSERT INTO {0} SELECT * FROM jsonb_populate_recordset(NULL::{0}, %s) ON CONFLICT DO NOTHING"
_BEST = """SELECT id, version, score, start, text, title, fields, parts FROM (
    SELECT DISTINCT ON (p.id) p.*, s.score, s.parts FROM passages p, LATERAL ({score}) s
    WHERE {where} ORDER BY p.id, s.score DESC, p.start
) best ORDER BY score DESC, id LIMIT %(n)s"""
_BM25 = f"""SELECT coalesce(sum(w), 0) AS score, jsonb_object_agg(name, w) AS parts FROM (
    SELECT q.name, q.idf * n * {K1 + 1} / (n + {K1} * ({1 - B} + {B} * p.length / %(mean)s::float8)) AS w
    FROM unnest(%(names)s::text[], %(terms)s::text[]::tsquery[], %(idf)s::float8[]) AS q(name, term, idf),
    LATERAL (SELECT round((6 / (pi() ^ 2 * (1 - ts_rank('{{1,1,1,1}}', p.terms, q.term))) - 0.5)::numeric)::float8 AS n) f
    WHERE p.terms @@ q.term) each"""
_NEAREST = """SELECT id, version, -distance, start, text, title, fields FROM (
    SELECT id, start, {distance} AS distance FROM vectors {joined} WHERE encoder = {encoder} {where}
    ORDER BY distance LIMIT %(limit)s
) v JOIN passages USING (id, start) ORDER BY distance, id"""


class PostgresIndex(Index):
    """See the top of this file."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._connection: psycopg.Connection[Any] | None = None
        self._schema = f"search {self.name}"
        with self._transaction():
            if not self._run("SELECT 1 FROM pg_namespace WHERE nspname = %s", (self._schema,)):
                if not self.writable:
                    raise ConfigError(
                        f"{self.url} has no index {self.name!r}", do="make it with `whorl watch`"
                    )
                self._create()
            self._extensions = {row[0] for row in self._run("SELECT extname FROM pg_extension")}

    def _create(self) -> None:
        self._run(SQL("CREATE SCHEMA {}").format(Identifier(self._schema)))
        self._run(_SCHEMA)
        self._run("INSERT INTO state VALUES (%s)", (_json({**EMPTY, "passages": 0, "length": 0}),))
        for name, statement in EXTENSIONS.items():
            if self._run("SELECT 1 FROM pg_available_extensions WHERE name = %s", (name,)):
                self._run(f"CREATE EXTENSION IF NOT EXISTS {name} SCHEMA public; {statement}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run statements on one state of the index."""
        with self._lock:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = self._connect()
                with self._connection.transaction():
                    yield
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise IndexUnavailableError(
                    f"{self.url}: {error}", expected="a server that answers"
                ) from error

    def _connect(self) -> psycopg.Connection[Any]:
        opened = psycopg.connect(self.url, autocommit=True, connect_timeout=10)
        opened.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        opened.execute("SELECT set_config('search_path', %s, false)", (f'"{self._schema}", public',))
        lock = "SELECT pg_try_advisory_lock(49, hashtext(%s))"
        if self.writable and opened.execute(lock, (self.name,)).fetchone() != (True,):
            opened.close()
            raise IndexBusyError(
                f"another process writes the index {self.name} in {self.url}", do="search it"
            )
        return opened

    def _run(self, statement: Any, values: Any = None) -> list[Any]:
        assert self._connection is not None
        done = self._connection.execute(statement, values)
        return done.fetchall() if done.description else []

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, *values: Any, **options: Any) -> None:
        with self._transaction():
            super().write(*values, **options)

    def _state(self) -> dict[str, Any]:
        with self._transaction():
            found: dict[str, Any] = self._run("SELECT state FROM state")[0][0]
            return found

    def _write(self, latest: Latest, state: dict[str, Any], expire: int) -> None:
        self._add_encoders(state["sizes"])
        known = self.versions([*latest])
        changed = {i: each for i, each in latest.items() if each[0] >= known.get(_clean(i), (-1, ""))[0]}
        ids = [*map(_clean, changed)]
        gone = [
            n
            for (n,) in self._run("DELETE FROM passages WHERE id = ANY(%s) RETURNING length", (ids,))
            if n is not None
        ]
        if "vector" in self._extensions:
            self._run("DELETE FROM vectors WHERE id = ANY(%s)", (ids,))
        made: dict[str, list[Any]] = {"passages": [], "words": [], "vectors": []}
        for id_, (version, document) in changed.items():
            if document is None:
                made["passages"].append({"id": id_, "start": 0, "version": version, "digest": ""})
            else:
                self._add_passages(document, made)
        for table, added in made.items():
            if added:
                self._run(_INSERT.format(table), (_json(added),))
        lengths = [row["length"] for row in made["passages"] if "length" in row]
        state["passages"] += len(lengths) - len(gone)
        state["length"] += sum(lengths) - sum(gone)
        self._run("UPDATE state SET state = %s", (_json(state),))
        if expire:
            self._run("DELETE FROM passages WHERE text IS NULL AND version < %s", (expire,))

    def _add_passages(self, document: SearchDocument, made: dict[str, list[Any]]) -> None:
        """Add the rows of each table."""
        exact = [each for name, value in document.fields.items() for each in exact_values(name, value)]
        head = {
            "version": document.version, "digest": document.digest, "title": document.title,
            "fields": document.fields, "exact": exact,
        }  # fmt: skip
        for passage in document.passages or [Passage(0, "")]:
            places, begin = dict[str, list[str]](), 1
            for text in (document.title, passage.text):
                words = self.analysis.words(text)
                stems = [self.analysis.stem(word) for word in words]
                made["words"] += [{"word": word} for word in {*words} if len(word) <= 500]
                for at, stem in enumerate(stems, begin):
                    places.setdefault(stem, []).append(str(min(at, 16383)))
                begin += len(stems) + GAP
            terms = " ".join(f"{_lexeme(stem)}:{','.join(some[:256])}" for stem, some in places.items())
            place = {"id": document.id, "start": passage.start}
            own = {"text": passage.text, "terms": terms, "length": sum(map(len, places.values()))}
            made["passages"].append(place | head | own)
            made["vectors"] += [
                {**place, "encoder": name, "vector": str(v.tolist())} for name, v in passage.vectors.items()
            ]

    def _add_encoders(self, sizes: Mapping[str, int]) -> None:
        for name in sizes.keys() - self._state()["sizes"].keys():
            if "vector" not in self._extensions:
                raise ConfigError(
                    f"{self.url} lacks the extension `vector`", do="install pgvector in the database"
                )
            if sizes[name] <= HNSW_SIZE:
                index = "CREATE INDEX ON vectors USING hnsw ((vector::vector({})) vector_ip_ops) WHERE encoder = {}"
                self._run(SQL(index).format(Literal(sizes[name]), Literal(name)))

    def versions(self, ids: Sequence[str]) -> dict[str, tuple[int, str]]:
        with self._transaction():
            query = "SELECT DISTINCT id, version, digest FROM passages WHERE id = ANY(%s)"
            return {
                id_: (version, digest) for id_, version, digest in self._run(query, ([*map(_clean, ids)],))
            }

    def documents(self) -> Iterator[tuple[str, int, str]]:
        with self._transaction():
            yield from self._run(
                "SELECT DISTINCT id, version, digest FROM passages WHERE text IS NOT NULL ORDER BY id"
            )

    def remove(self) -> None:
        with self._transaction():
            self._run(SQL("DROP SCHEMA {} CASCADE").format(Identifier(self._schema)))
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _search(self, query: SearchQuery) -> SearchResults:
        with self._transaction():
            return super()._search(query)

    def frequencies(self, stems: Sequence[str]) -> dict[str, int]:
        counted = "SELECT count(*) FROM passages WHERE terms @@ q::tsquery"
        query = f"SELECT s, ({counted}) FROM unnest(%s::text[], %s::text[]) t(s, q)"
        return dict(self._run(query, ([*stems], [*map(_lexeme, stems)])))

    def similar(self, word: str, edits: int) -> list[str]:
        query, values = "SELECT word FROM words WHERE length(word) BETWEEN %s AND %s", list[str]()
        if "pg_trgm" in self._extensions:
            self._run("SELECT set_config('pg_trgm.similarity_threshold', '0.1', true)")
            query, values = query + " AND word %% %s", [word]
        return [each for (each,) in self._run(query, [len(word) - edits, len(word) + edits, *values])]

    def begins(self, prefix: str) -> list[str]:
        return [word for (word,) in self._run("SELECT word FROM words WHERE word ^@ %s", (prefix,))]

    def _where(self, plan: QueryPlan, query: SearchQuery) -> tuple[list[str], dict[str, Any]]:
        """Return the conditions on passages p, with their values; the first one excludes deletions."""
        should, must, never = ([_phrase(c) for c in some] for some in (plan.some, plan.must, plan.never))
        parts = must or [f"({' | '.join(should)})"] * bool(should)
        match = " & ".join([*parts, *(f"!({each})" for each in never)])
        where, values = ["p.text IS NOT NULL"], dict[str, Any](match=match)
        where += ["p.terms @@ %(match)s::tsquery"] * bool(match)
        for i, (name, value) in enumerate(query.filters.items()):
            if isinstance(value, tuple):
                values |= {
                    f"{part}{i}": each
                    for part, each in zip(("name", "low", "high"), (name, *value), strict=True)
                }
                where.append(
                    f"jsonb_typeof(p.fields -> %(name{i})s) = 'number' AND (p.fields ->> %(name{i})s)::float8 BETWEEN"
                    f" coalesce(%(low{i})s::float8, '-infinity') AND coalesce(%(high{i})s::float8, 'infinity')"
                )
            else:
                values[f"some{i}"] = [*map(_clean, wanted_values(name, value))]
                where.append(f"p.exact && %(some{i})s::text[]")
        return where, values

    def _by_text(self, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        where, values = self._where(plan, query)
        state, found = self._state(), self.frequencies(plan.stems)
        idf = [log(1 + (state["passages"] - found[stem] + 0.5) / (found[stem] + 0.5)) for stem in plan.stems]
        values |= {"names": plan.stems, "terms": [*map(_lexeme, plan.stems)], "idf": idf, "n": n}
        values["mean"] = max(1.0, state["length"] / max(1, state["passages"]))
        rows = self._run(_BEST.format(score=_BM25, where=" AND ".join(where)), values)
        return [replace(SearchHit(*row[:7]), explanation=(query.explain and row[7]) or {}) for row in rows]

    def _by_vectors(self, vector: Vectors, plan: QueryPlan, query: SearchQuery, n: int) -> list[SearchHit]:
        """Read more passages until they have enough documents. A filter is exact: no index is used."""
        where, values = self._where(replace(plan, should=(), begins=()), query)
        size, is_filtered, values["vector"], values["limit"] = (
            len(vector),
            len(where) > 1,
            str(vector.tolist()),
            2 * n,
        )
        statement = _NEAREST.format(
            distance=f"(vector::vector({size}) <#> %(vector)s::vector({size}))" + " + 0" * is_filtered,
            joined="v JOIN passages p USING (id, start)" * is_filtered,
            where="".join(f" AND {each}" for each in where if is_filtered), encoder=Literal(self.encoder).as_string(),
        )  # fmt: skip
        while True:
            self._run("SELECT set_config('hnsw.ef_search', %s, true)", (str(min(1000, values["limit"])),))
            rows, best = self._run(statement, values), dict[str, SearchHit]()
            for row in rows:
                best.setdefault(row[0], SearchHit(*row[:7]))
            if len(best) >= n or len(rows) < min(1000, values["limit"]):
                return [*best.values()][:n]
            values["limit"] *= 4

    def _totals(self, plan: QueryPlan, query: SearchQuery) -> tuple[int, Facets]:
        where, values = self._where(plan, query)
        fit = f"WITH fit AS MATERIALIZED (SELECT DISTINCT id, exact FROM passages p WHERE {' AND '.join(where)})"
        counts = f"""{fit} SELECT substr(e, %(from)s), count(*) FROM fit, unnest(exact) e WHERE e ^@ %(begin)s
            GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {FACET_VALUES}"""
        begins = {name: _clean(name) + SEPARATOR for name in query.facets}
        return self._run(f"{fit} SELECT count(*) FROM fit", values)[0][0], {
            name: dict(self._run(counts, {**values, "begin": begin, "from": len(begin) + 1}))
            for name, begin in begins.items()
        }


def _clean(text: str) -> str:
    return text.replace("\0", "\ufffd")  # no text of PostgreSQL has NUL


def _json(value: Any) -> str:
    return orjson.dumps(value).decode().replace("\\u0000", "\\ufffd")


def _lexeme(term: str) -> str:
    return "'" + _clean(term[:500]).replace("\\", "\\\\").replace("'", "''") + "'"


def _phrase(phrase: Phrase) -> str:
    return " <-> ".join(map(_lexeme, phrase))
