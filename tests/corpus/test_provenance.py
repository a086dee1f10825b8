"""Why each document is in or out: ids, rules with their values, copies, splits, quarantine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.config import DEFAULT_QUERY
from whorl.corpus.documents import document_id
from whorl.corpus.measures.measure import MeasureConfig
from whorl.corpus.provenance.explain import explain, rule_condition
from whorl.corpus.provenance.figures import count_sources, dropped_samples, largest_clusters, selection_bias
from whorl.corpus.provenance.tables import CorpusTables, find_rows
from whorl.errors import DataError
from whorl.tracking.progress import Progress


def lines(rng: random.Random, n: int) -> str:
    return "".join(" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(8)) + "\n" for _ in range(n))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Data, documents and selection: 40 texts in two folders, a short one, a copy, a near copy, a binary one."""
    root, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    data, documents, selection = (root / name for name in ("data", "documents", "selection"))
    for folder in (data / "a", data / "b", documents, selection):
        folder.mkdir(parents=True)
    for i in range(40):
        (data / "ab"[i % 2] / f"{i:02d}.txt").write_text(lines(rng, 20))
    (data / "a" / "short.txt").write_text("little")
    first = (data / "a" / "00.txt").read_text()
    (data / "b" / "records.jsonl").write_text('{"text": ' + repr(first).replace("'", '"') + "}\n")
    (data / "b" / "near.txt").write_text(first + lines(rng, 1))
    (data / "b" / "bad.txt").write_bytes(b"a\0b")
    ingest(IngestConfig(sources=[str(data)]), documents, Progress.silent())
    config = CurateConfig(near_duplicates="remove", near_duplicate_similarity=0.8)
    curate(config, document_files(documents), selection, Progress.silent())
    return data, documents, selection


def test_every_document_has_a_verdict(made: tuple[Path, Path, Path]) -> None:
    _, documents, selection = made
    tables = CorpusTables(documents, selection)
    ids = tables.columns("documents", ["id"])["id"].to_pylist()
    chosen = tables.columns("selection", ["split", "reason"]).to_pylist()
    assert len(ids) == 43
    for id, row in zip(ids, chosen, strict=True):
        found = explain(id, documents, selection, query=DEFAULT_QUERY)
        assert (found.id, found.split, found.reason) == (id, row["split"], row["reason"])
        assert (found.verdict == "kept") == bool(found.split) == (not found.reason)
        assert found.measures["n_bytes"] > 0
        if found.reason == "near_duplicate":
            assert found.duplicate["similarity"] >= 0.8
        elif found.reason:
            assert found.condition and found.values


def test_rule_is_named_with_the_value_that_dropped(made: tuple[Path, Path, Path]) -> None:
    _, documents, selection = made
    found = explain("short.txt", documents, selection, query=DEFAULT_QUERY)
    assert (found.verdict, found.reason, found.condition) == ("dropped", "too_short", "n_bytes < 100")
    assert found.values == {"n_bytes": 6}


def test_copies_name_the_document_that_stays(made: tuple[Path, Path, Path]) -> None:
    data, documents, selection = made
    exact = explain("records.jsonl", documents, selection, query=DEFAULT_QUERY)
    assert exact.reason == "exact_duplicate" and exact.duplicate["kind"] == "exact"
    assert exact.duplicate["id"] == document_id(str(data), "a/00.txt", 0) != exact.id
    near = explain("b/near.txt", documents, selection, query=DEFAULT_QUERY)
    assert near.reason == "near_duplicate" and near.duplicate["path"] == "a/00.txt"
    # 8 words x 20 lines: 156 shingles of five words, 164 with one line more.
    assert near.duplicate["similarity"] == pytest.approx(156 / 164)


def test_rejected_records_are_explained(made: tuple[Path, Path, Path]) -> None:
    data, documents, selection = made
    by_path = explain("b/bad.txt", documents, selection)
    by_id = explain(document_id(str(data), "b/bad.txt", 0), documents, selection)
    assert by_path == by_id == explain("b/bad.txt:0", documents, selection)
    assert (by_path.verdict, by_path.reason) == ("quarantined", "binary") and "NUL" in by_path.detail


def test_references_name_one_document(made: tuple[Path, Path, Path]) -> None:
    data, documents, selection = made
    tables = CorpusTables(documents)
    id = document_id(str(data), "a/02.txt", 0)
    for reference in (id, id[:12], "a/02.txt", "02.txt", "a/02.txt:0", f"{data}/a/02.txt"):
        assert [row["id"] for row in find_rows(tables, reference).values()] == [id], reference
    assert not find_rows(tables, "2.txt") and not find_rows(tables, "a/02.txt:5")
    with pytest.raises(DataError, match="no document 'nowhere'"):
        explain("nowhere", documents, selection)
    assert explain(id, documents).verdict == "not curated"


def test_ambiguous_path_lists_the_ids(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    ingest(IngestConfig(sources=[str(tmp_path / "data")]), tmp_path / "out", Progress.silent())
    with pytest.raises(DataError, match=r"names 2 documents.*r\.jsonl:16"):
        explain("r.jsonl", tmp_path / "out")
    assert explain("r.jsonl:16", tmp_path / "out").offset == 16


def test_figures_add_up(made: tuple[Path, Path, Path]) -> None:
    _, documents, selection = made
    tables = CorpusTables(documents, selection)
    sources = count_sources(tables)
    assert {s.source for s in sources} == {"a/", "b/"}
    reasons = tables.columns("selection", ["reason"])["reason"].to_pylist()
    assert sum(s.documents for s in sources) == 43
    assert sum(s.kept_documents for s in sources) == reasons.count("") == 40
    assert sum(s.bytes for s in sources) == sum(
        tables.columns("attributes", ["n_bytes"])["n_bytes"].to_pylist()
    )
    samples = dropped_samples(tables, DEFAULT_QUERY, per_rule=1)
    assert sorted(s.reason for s in samples) == sorted({r for r in reasons if r})
    assert dropped_samples(tables, DEFAULT_QUERY, reason="too_short")[0].excerpt == "little"
    (cluster,) = largest_clusters(tables)
    assert cluster.kept == 1 and set(cluster.paths) == {"a/00.txt", "b/records.jsonl", "b/near.txt"}


def test_bias_counts_kept_and_dropped_by_language_source_and_domain(tmp_path: Path) -> None:
    data, documents, selection = (tmp_path / name for name in ("data", "documents", "selection"))
    for folder in (data, documents, selection):
        folder.mkdir()
    urls = ["https://a.example/1", "HTTP://user@A.example:80/2", "https://b.example?q", None, "mailto:x"]
    rows = [
        {"text": lines(random.Random(i), 20) if i % 4 else "little", "url": urls[i % 5]} for i in range(100)
    ]
    (data / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "code.py").write_text("value = 1\n" * 20)
    ingest(IngestConfig(sources=[str(data)]), documents, Progress.silent())
    cases: list[tuple[list[str | MeasureConfig], set[str]]] = [([], {"python"}), (["language"], {"en"})]
    for measures, languages in cases:
        curate(CurateConfig(measures=measures), document_files(documents), selection, Progress.silent())
        tables = CorpusTables(documents, selection)
        found = selection_bias(tables)
        reasons = tables.columns("selection", ["reason"])["reason"].to_pylist()
        sizes = tables.columns("attributes", ["n_bytes"])["n_bytes"].to_pylist()
        kept = [size for size, reason in zip(sizes, reasons, strict=True) if not reason]
        for groups in found.values():
            assert sum(g.kept_documents for g in groups) == len(kept)
            assert sum(g.dropped_documents for g in groups) == len(sizes) - len(kept) > 0
            assert sum(g.kept_bytes for g in groups) == sum(kept)
            assert sum(g.dropped_bytes for g in groups) == sum(sizes) - sum(kept)
        domains = {g.value: (g.kept_documents, g.dropped_documents) for g in found["domain"]}
        assert {k: sum(v) for k, v in domains.items()} == {"a.example": 40, "b.example": 20, "": 41}
        assert domains["a.example"] == (30, 10)
        assert languages & {g.value for g in found["language"]} or measures


def test_condition_of_a_rule_ends_at_its_branch() -> None:
    query = "SELECT row, CASE when a > 1\n AND b THEN 'x' WHEN c < 2 then 'y' ELSE '' END AS reason FROM attributes"
    assert rule_condition(query, "x") == "a > 1 AND b"
    assert rule_condition(query, "y") == "c < 2"
    assert rule_condition(query, "z") == rule_condition(query, "") == ""
