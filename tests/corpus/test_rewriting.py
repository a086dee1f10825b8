"""Rewriting of documents against the functions of texts, over files and workers; the record of the changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.support.corpus.repeats import deduplicate_lines, deduplicate_substrings

from whorl.cli.jobs.corpus_store import latest, run_step
from whorl.corpus import IngestConfig, document_files, ingest
from whorl.corpus.deduplication.lines import LineConfig
from whorl.corpus.mapreduce import LocalPool
from whorl.corpus.provenance.explain import explain
from whorl.corpus.rewrite import RewriteConfig, edits_of, rewrite
from whorl.store import Store
from whorl.tracking.progress import Progress

FOOTER = "All rights reserved by the example company of this page."
TEXTS = [
    f"One page about cats.\n{FOOTER}\nWrite to ann@example.org or 8.8.8.8.",
    f"Another page, about dogs.\n{FOOTER}\nThe end.", "A text without anything in common: naïve 日本 readers.",
    f"{FOOTER}\nThe end.", "",
]  # fmt: skip


def make_documents(folder: Path, texts: Sequence[str], n_files: int = 2) -> list[Path]:
    """Ingest texts and divide the documents into files."""
    source = folder / "source"
    source.mkdir(parents=True)
    lines = "".join(json.dumps({"text": text or " "}) + "\n" for text in texts)
    (source / "texts.jsonl").write_text(lines)
    ingest(IngestConfig(sources=[str(source)]), folder / "ingest", Progress.silent())
    (whole,) = document_files(folder / "ingest")
    table = pq.read_table(whole)
    step = -(-len(table) // n_files)
    for number in range(n_files):
        part = table.slice(number * step, step)
        pq.write_table(part, folder / "ingest" / f"documents-{number:05d}.parquet", row_group_size=2)
    return document_files(folder / "ingest")


def texts_of(files: Sequence[Path]) -> list[str]:
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def run(
    folder: Path, files: Sequence[Path], config: RewriteConfig, workers: int = 1
) -> tuple[list[str], dict[str, Any]]:
    out = folder / f"out{workers}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    made = rewrite(
        config,
        files,
        out,
        Progress.silent(),
        executor=LocalPool(workers, isolate=True),
        units=folder / f"units{workers}",
    )
    return texts_of(document_files(out)), made


LINES = st.lists(st.sampled_from(["a b", "a  b", "c", "", "longer line of words", "日本"]), max_size=5)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(LINES.map("\n".join).filter(str.strip), min_size=1, max_size=7),
    st.sampled_from(["first", "none"]),
    st.integers(1, 3),
)
def test_lines_over_files_equal_the_function_of_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], keep: Any, n_files: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    files = make_documents(folder, texts, n_files)
    lines = LineConfig(keep=keep)
    want, n_lines, n_bytes = deduplicate_lines(texts_of(files), lines)
    found, made = run(folder, files, RewriteConfig(mask=False, lines=lines))
    assert found == want
    counts = made["edits"].get("line", {"count": 0, "bytes": 0})
    assert (counts["count"], counts["bytes"]) == (sum(n_lines), n_bytes)


def test_all_passes_follow_each_other_and_are_recorded(tmp_path: Path) -> None:
    files = make_documents(tmp_path, TEXTS)
    config = RewriteConfig(mask=True, lines=LineConfig(), substrings=16)
    found, made = run(tmp_path, files, config)
    masked = [
        text.replace("ann@example.org", "<EMAIL>").replace("8.8.8.8", "<IP>") for text in texts_of(files)
    ]
    lines = deduplicate_lines(masked)[0]
    assert found == deduplicate_substrings(lines, 16)[0]
    assert found[0].startswith("One page about cats.\nAll rights") and FOOTER not in found[1]
    assert {k: made["edits"][k]["count"] for k in ("email", "ip", "line")} == {"email": 1, "ip": 1, "line": 3}
    assert made["bytes"] == sum(len(text.encode()) for text in found)
    ids = [name for file in files for name in pq.read_table(file)["id"].to_pylist()]
    (edit,) = edits_of(tmp_path / "out1", ids[1])
    assert edit["kind"] == "line" and edit["count"] == 1 and edit["matched_id"] == ids[0]
    assert edit["bytes"] == len(FOOTER) + 1
    assert [e["kind"] for e in edits_of(tmp_path / "out1", ids[0])] == ["email", "ip"]
    assert edits_of(tmp_path / "ingest", ids[0]) == []
    why = explain(ids[3], tmp_path / "out1")
    assert why.edits[0]["matched_id"] == ids[0] and why.edits[0]["count"] == 2


def test_workers_give_equal_bytes_and_units_are_used_again(tmp_path: Path) -> None:
    files = make_documents(tmp_path, TEXTS)
    config = RewriteConfig(mask=True, lines=LineConfig(keep="none"), substrings=20)
    for workers in (1, 2):
        run(tmp_path, files, config, workers)
    one, two = ([*sorted((tmp_path / f"out{n}").glob("*.parquet"))] for n in (1, 2))
    assert [p.name for p in one] == [p.name for p in two] and len(one) == 2 + 3 * 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "units1").glob("*/documents.parquet")}
    run(tmp_path, files, config)
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "units1").glob("*/documents.parquet")}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="nothing to change"):
        RewriteConfig(mask=False)
    with pytest.raises(ValidationError, match="substrings"):
        RewriteConfig(substrings=3)


def test_filter_reads_the_rewritten_documents(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(12):
        body = f"Page {number} has text of its own, with enough words to be kept by the default query: {number * 7919}."
        (source / f"{number}.txt").write_text(f"{body * 2}\n{FOOTER}\nwrite to someone@example.org")
    store = Store(tmp_path / "store")
    run_step(store, "mine", "ingest", {"sources": [str(source)]})
    run_step(store, "mine", "rewrite", {}, ["lines.keep=first"])
    run_step(store, "mine", "curate", {}, ["validation_bytes=400", "test_bytes=400"])
    documents, selection = latest(store, "mine")
    assert documents.step == "rewrite" and selection is not None
    texts = texts_of(document_files(documents.path))
    assert sum(FOOTER in text for text in texts) == 1 and not any("@example" in text for text in texts)
    assert documents.summary["edits"]["email"]["documents"] == 12
    run_step(store, "mine", "ingest", {"sources": [str(source)]}, ["include=['*.txt']"])
    assert latest(store, "mine")[0].step == "ingest"  # rewrite has not read these documents
