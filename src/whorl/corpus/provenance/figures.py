"""Figures of a curated corpus: counts by source, samples of what each rule dropped, the largest clusters.

They read columns of the side files, and the text of the samples only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whorl.corpus.provenance.explain import rule_condition
from whorl.corpus.provenance.tables import CorpusTables

EXCERPT_CHARACTERS = 240


@dataclass(frozen=True)
class SourceCount:
    """Documents and bytes of text of one source, read and kept."""

    source: str
    documents: int
    bytes: int
    kept_documents: int
    kept_bytes: int


@dataclass(frozen=True)
class GroupCount:
    """Documents and bytes of text that a selection kept and dropped, of one language, source or domain."""

    value: str
    kept_documents: int
    kept_bytes: int
    dropped_documents: int
    dropped_bytes: int


@dataclass(frozen=True)
class DroppedSample:
    """The beginning of a document that a rule dropped. condition: the rule's SQL, "" if it is no branch of the query."""

    reason: str
    condition: str
    id: str
    path: str
    excerpt: str


@dataclass(frozen=True)
class Cluster:
    """Near duplicates: paths of all members in row order, and how many of them were kept."""

    paths: Sequence[str]
    kept: int


def count_sources(tables: CorpusTables) -> list[SourceCount]:
    """Return the counts of each source, those with the most kept bytes first.

    With a single source, the first folders of the paths count as the sources.
    """
    import duckdb

    joined = tables.columns("attributes", ["source", "path", "n_bytes"])
    joined = joined.append_column("reason", tables.columns("selection", ["reason"])["reason"])
    with duckdb.connect(config={"threads": 1}) as database:
        database.register("joined", joined)
        rows = database.execute(
            "SELECT CASE WHEN (SELECT count(DISTINCT source) FROM joined) > 1 THEN source "
            "WHEN contains(path, '/') THEN split_part(path, '/', 1) || '/' ELSE '(top folder)' END AS name, "
            "count(*), sum(n_bytes), count(*) FILTER (reason = ''), "
            "coalesce(sum(n_bytes) FILTER (reason = ''), 0) AS kept FROM joined GROUP BY name ORDER BY kept DESC, name"
        ).fetchall()
    return [SourceCount(name, *map(int, counts)) for name, *counts in rows]


def selection_bias(tables: CorpusTables, rule: str = "") -> dict[str, list[GroupCount]]:
    """Return the documents and bytes that a selection kept and dropped, by language, source and domain.

    Args:
        rule: count as dropped only what this reason, or a rule of this filter, dropped; leave out what others dropped.

    The language is that of the measure `language` if it was applied, else that of the file's suffix. The domain is the host
    of the document's URL. A document without one counts under "".

    Returns:
        "language", "source", "domain" -> counts of each value, those with the most bytes first.
    """
    import duckdb

    joined = tables.columns("attributes", ["source", "language", "n_bytes"])
    if "text_language" in tables.names("attributes"):
        joined = joined.append_column(
            "text_language", tables.columns("attributes", ["text_language"])["text_language"]
        )
    if "domain" in tables.names("attributes"):
        joined = joined.append_column("domain", tables.columns("attributes", ["domain"])["domain"])
    joined = joined.append_column("reason", tables.columns("selection", ["reason"])["reason"])
    values = {
        "language": "text_language" if "text_language" in joined.column_names else "language",
        "source": "source",
        "domain": "domain" if "domain" in joined.column_names else "''",
    }
    kept, counted = "FILTER (reason = '')", "TRUE"
    if rule:
        counted = "reason = '' OR reason = $rule OR starts_with(reason, $rule || ':')"
    found = {}
    with duckdb.connect(config={"threads": 1}) as database:
        database.register("joined", joined)
        for name, value in values.items():
            rows = database.execute(
                f"SELECT coalesce({value}, '') AS name, count(*) {kept}, coalesce(sum(n_bytes) {kept}, 0), count(*), "
                f"sum(n_bytes) AS size FROM joined WHERE {counted} GROUP BY name ORDER BY size DESC, name",
                {"rule": rule} if rule else {},
            ).fetchall()
            found[name] = [
                GroupCount(group, n_kept, int(kept_bytes), n - n_kept, int(size - kept_bytes))
                for group, n_kept, kept_bytes, n, size in rows
            ]
    return found


def dropped_samples(
    tables: CorpusTables, query: str, *, per_rule: int = 3, reason: str = ""
) -> list[DroppedSample]:
    """Return some documents of each rule, chosen by a hash of their rows, the rule that dropped most first.

    Args:
        reason: of this rule only.
    """
    reasons = tables.columns("selection", ["reason"])["reason"].to_pylist()
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(reasons):
        if word and (not reason or word == reason):
            rows.setdefault(word, []).append(row)
    names = sorted(rows, key=lambda name: (-len(rows[name]), name))
    chosen = {name: sorted(rows[name], key=_hash_order)[:per_rule] for name in names}
    texts = tables.rows(
        "documents", [row for some in chosen.values() for row in some], ["id", "path", "text"]
    )
    return [
        DroppedSample(
            name, rule_condition(query, name), texts[row]["id"], texts[row]["path"], _excerpt(texts[row]["text"])
        )
        for name in names
        for row in chosen[name]
    ]  # fmt: skip


def largest_clusters(tables: CorpusTables, n: int = 5) -> list[Cluster]:
    """Return the clusters with the most documents."""
    import numpy as np

    cluster = tables.columns("attributes", ["cluster"])["cluster"].to_numpy()
    reasons: Any = np.array(tables.columns("selection", ["reason"])["reason"].to_pylist(), dtype=object)
    members = np.bincount(cluster, minlength=len(cluster))
    largest = np.argsort(-members, kind="stable")[:n]
    groups = [np.flatnonzero(cluster == first) for first in largest if members[first] > 1]
    paths = tables.rows("documents", [int(row) for rows in groups for row in rows], ["path"])
    return [
        Cluster([paths[int(r)]["path"] for r in rows], int((reasons[rows] == "").sum())) for rows in groups
    ]


def _hash_order(row: int) -> bytes:
    return hashlib.blake2b(row.to_bytes(8, "big"), digest_size=8).digest()


def _excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + " ..."
