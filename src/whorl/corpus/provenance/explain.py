"""Explain one document: where it comes from, what was measured, and what kept or dropped it.

The verdict is read from the selection, so it is that of the run. The evidence comes from the side files: the columns that
the rule of the query names, with their values; the row that a removed copy matched, with its similarity; the split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whorl.corpus.decontamination.attributes import CONTAMINATION_FILE
from whorl.corpus.deduplication.shingles import jaccard_similarity
from whorl.corpus.documents import document_id
from whorl.corpus.provenance.tables import CorpusTables, find_rows, one_row
from whorl.corpus.rewrite import edits_of

IDENTITY = (
    "row",
    "source",
    "path",
    "language",
    "licence",
    "url",
    "domain",
    "time",
    "media_type",
)  # columns of the attributes that are no measures


@dataclass(frozen=True)
class Explanation:
    """The answer of `why`.

    verdict: "kept", "dropped", "quarantined", "copy of a file" or "not curated".
    reason: the word of the rule; condition: its SQL; values: the columns in the condition.
    edits: changes of its text by `rewrite`: kind, count, bytes, matched_id.
    test_item: the test item that the document holds: test_set, item, begin_word, end_word, score.
    duplicate: id, path, offset, kind and similarity of the document that stayed.
    """

    verdict: str
    source: str
    path: str
    offset: int
    id: str = ""
    length: int = 0
    licence: str | None = None
    language: str | None = None
    split: str = ""
    reason: str = ""
    detail: str = ""
    condition: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    duplicate: Mapping[str, Any] = field(default_factory=dict)
    test_item: Mapping[str, Any] = field(default_factory=dict)
    edits: Sequence[Mapping[str, Any]] = ()
    measures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {key: _json_value(value) for key, value in asdict(self).items()}


def explain(
    reference: str, documents: Path, selection: Path | None = None, *, query: str = ""
) -> Explanation:
    """Return why a document is in or out.

    Args:
        reference: see `find_rows`; also the path of a file or record that was not read.
        documents, selection: the folders of `ingest` and `curate`.
        query: the selection's query.

    Raises:
        DataError: no document, record or file has this name, or several have.
    """
    tables = CorpusTables(documents, selection)
    if not find_rows(tables, reference) and (unread := _unread(reference, documents)) is not None:
        return unread
    row, _ = one_row(tables, reference)
    names = ["id", "source", "path", "offset", "length", "licence", "language"]
    about = tables.rows("documents", [row], names)[row]
    about["edits"] = edits_of(documents, about["id"])
    if selection is None:
        return Explanation("not curated", **about)
    chosen = tables.rows("selection", [row])[row]
    measured = tables.rows("attributes", [row])[row]
    measures = {name: value for name, value in measured.items() if name not in IDENTITY}
    reason = chosen["reason"]
    condition = rule_condition(query, reason)
    columns = set(re.findall(r"\w+", condition))
    return Explanation(
        "dropped" if reason else "kept", **about, split=chosen["split"], reason=reason, condition=condition,
        values={name: value for name, value in measured.items() if name in columns},
        duplicate=_duplicate(tables, row, measured) if "duplicate" in reason else {},
        test_item=_test_item(row, selection),
        measures=measures,
    )  # fmt: skip


def rule_condition(query: str, reason: str) -> str:
    """Return the SQL condition after which a CASE gives this reason, or "" if the query has no such branch."""
    found = re.search(rf"\bTHEN\s+'{re.escape(reason)}'", query, re.IGNORECASE) if reason else None
    if found is None:
        return ""
    before = re.split(r"\bWHEN\b", query[: found.start()], flags=re.IGNORECASE)
    return " ".join(before[-1].split()) if len(before) > 1 else ""


def _test_item(row: int, selection: Path) -> dict[str, Any]:
    """Return the test item that a document holds, or {}."""
    import pyarrow.parquet as pq

    path = selection / CONTAMINATION_FILE
    found = pq.read_table(path, filters=[("row", "=", row)]).to_pylist() if path.is_file() else []
    return {name: value for name, value in found[0].items() if name != "row"} if found else {}


def _duplicate(tables: CorpusTables, row: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that stayed in place of a removed copy, or {}."""
    import pyarrow.compute as pc

    if tables.has("duplicates"):
        has_corpus = "corpus" in tables.names("duplicates")
        names = ["row", "kind", "matched_id", "similarity", *(["corpus"] if has_corpus else [])]
        found = tables.columns("duplicates", names)
        matches = found.filter(pc.equal(found["row"], row)).to_pylist()
        if matches:
            best = max(matches, key=lambda match: match["similarity"] or 0.0)
            rows = find_rows(tables, best["matched_id"])
            place = next(iter(rows.values()), {})
            corpus = {"corpus": best["corpus"]} if best.get("corpus") else {}
            known = {"kind": best["kind"], "similarity": best["similarity"], **corpus}
            return {"id": best["matched_id"], **({} if corpus else place), **known}
    if measured.get("exact_duplicate"):
        copies = tables.columns("attributes", ["exact_hash", "exact_duplicate"])
        stays = pc.and_(
            pc.equal(copies["exact_hash"], measured["exact_hash"]), pc.invert(copies["exact_duplicate"])
        )
        first = int(pc.index(stays, True).as_py())
        place = tables.rows("documents", [first], ["id", "source", "path", "offset"])[first]
        return {**place, "kind": "exact", "similarity": 1.0}
    return _most_similar_kept(tables, row, measured)


def _most_similar_kept(tables: CorpusTables, row: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kept document of the same cluster with the highest exact Jaccard similarity, or {}."""
    import numpy as np

    if measured["cluster_documents"] < 2:
        return {}
    clusters = tables.columns("attributes", ["cluster"])["cluster"].to_numpy()
    reasons = tables.columns("selection", ["reason"])["reason"].to_pylist()
    kept = [int(i) for i in np.flatnonzero(clusters == measured["cluster"]) if not reasons[i]]
    found = tables.rows("documents", [row, *kept], ["id", "source", "path", "offset", "text"])
    texts = {i: document.pop("text").encode() for i, document in found.items()}
    similarity = {i: jaccard_similarity(texts[row], texts[i]) for i in kept}
    if not similarity:
        return {}
    best = max(similarity, key=lambda i: similarity[i])
    return {**found[best], "kind": "near", "similarity": similarity[best]}


def _unread(reference: str, documents: Path) -> Explanation | None:
    """Return the explanation of a rejected record or of a file that is a copy, or None."""
    copies, quarantine = documents / "copies.jsonl", documents / "quarantine.jsonl"
    path, colon, offset = reference.rpartition(":")
    for line in _lines(copies):
        if _names(reference, line):
            return Explanation(
                "copy of a file", line["source"], line["path"], 0,
                duplicate={"source": line["of_source"], "path": line["of_path"], "kind": "file", "similarity": 1.0},
            )  # fmt: skip
    for line in _lines(quarantine):
        id = document_id(line["source"], line["path"], line["offset"])
        at_offset = colon and offset.isdecimal() and line["offset"] == int(offset) and _names(path, line)
        if id == reference or at_offset or _names(reference, line):
            return Explanation(
                "quarantined", line["source"], line["path"], line["offset"], id, line["length"],
                reason=line["reason"], detail=line["detail"],
            )  # fmt: skip
    return None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _names(reference: str, line: Mapping[str, Any]) -> bool:
    full = f"{line['source']}/{line['path']}"
    return reference in (line["path"], full) or full.endswith("/" + reference.lstrip("/"))


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return {name: _json_value(v) for name, v in value.items()} if isinstance(value, Mapping) else value
