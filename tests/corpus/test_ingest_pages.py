"""Ingest of pages: archives, HTML, PDF; provenance and normalisation of documents."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.data.formats.test_warc import URL, frame, http, page, response
from tests.data.test_extraction import ENCRYPTED, pdf

from whorl.corpus import IngestConfig, ingest
from whorl.corpus.documents import PROVENANCE
from whorl.data.extraction import corpus_extra
from whorl.data.formats import web
from whorl.errors import DataError
from whorl.tracking.progress import Progress


def run(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the documents, and path -> reason of the rejected ones."""
    out = folder.parent / f"out of {folder.name}"
    ingest(IngestConfig(sources=[str(folder)], **options), out, Progress.silent())
    rows = [row for path in sorted(out.glob("documents-*")) for row in pq.read_table(path).to_pylist()]
    lines = map(json.loads, (out / "quarantine.jsonl").read_text().splitlines())
    return rows, {line["path"]: line["reason"] for line in lines}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_pages_of_each_format(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "data",
        {
            "a.html": page("cafe\u0301 \r\n time"), "b.pdf": pdf([["of a PDF"]]), "c.pdf": pdf([["secret"]], ENCRYPTED),
            "d.warc.gz": gzip.compress(response("in an archive")), "e.txt.bz2": bz2.compress(b"one") + bz2.compress(b" two"),
            "f.html": b"\0\1" * 100, "g.html": page("large " * 9000),
        },
    )  # fmt: skip
    rows, rejected = run(folder, max_document_bytes=20_000)
    assert [row["text"].strip() for row in rows] == ["café time", "of a PDF", "in an archive", "one two"]
    assert [row["media_type"] for row in rows] == ["text/html", "application/pdf", "text/html", None]
    assert [row["language"] for row in rows] == [None, None, None, "text"]
    assert {name: rows[2][name] for name in PROVENANCE} == {
        "url": URL, "title": "T", "time": "2026-11-24T00:00:00Z", "media_type": "text/html",
    }  # fmt: skip
    assert rejected == {"c.pdf": "encrypted", "f.html": "binary", "g.html": "too_large"}


def test_html_is_source_code_where_configured(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {"a.html": b"<p>source</p>\r\n", "b.pdf": pdf([["x"]]) + b"\0"})
    ((row,), rejected) = run(folder, formats={".html": "text", ".pdf": "text"})
    assert (row["text"], row["language"]) == ("<p>source</p>\r\n", "html")
    assert rejected == {"b.pdf": "binary"}


def test_saved_pages_are_read_without_their_parts(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {"a.html": page("the page"), "own_files.txt": b"own"})
    for name in ("a_files/frame.html", "a_files/deep/x.js", "b_files/kept.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("kept")
    rows, rejected = run(folder)
    assert [row["path"] for row in rows] == ["a.html", "b_files/kept.txt", "own_files.txt"] and not rejected


def test_pages_without_the_extra_are_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "extract", lambda *_, **__: (_ for _ in ()).throw(corpus_extra("resiliparse")))
    folder = write(tmp_path / "data", {"a.html": page("x"), "b.txt": b"text"})
    rows, rejected = run(folder)
    assert [row["path"] for row in rows] == ["b.txt"] and rejected == {"a.html": "not_installed"}
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match=r"pip install 'whorl\[corpus\]'"):
        run(folder)


def test_records_carry_provenance_of_their_fields(tmp_path: Path) -> None:
    records = [
        {"text": "a\r\n", "url": URL, "timestamp": "2026"}, {"text": "b", "meta": {"url": URL, "title": "\ud800 T"}},
        {"text": "c", "url": 7, "meta": [1]},
    ]  # fmt: skip
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    rows, _ = run(write(tmp_path / "plain", {"a.jsonl": data}))
    assert [(r["text"], r["url"], r["title"], r["time"]) for r in rows] == [
        ("a\r\n", URL, None, "2026"), ("b", URL, "? T", None), ("c", None, None, None),
    ]  # fmt: skip
    rows, _ = run(write(tmp_path / "normalised", {"a.jsonl": data}), normalise=["line_ends"])
    assert rows[0]["text"] == "a\n"


def test_archive_of_many_blocks_keeps_every_page(tmp_path: Path, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setattr(sys.modules[ingest.__module__], "BLOCK_BYTES", 3000)
    records = [response(f"page {n}") if n % 7 else frame(http(b"x", "image/png")) for n in range(60)]
    rows, rejected = run(write(tmp_path / "data", {"a.warc": b"".join(records)}))
    assert [row["text"] for row in rows] == [f"page {n}" for n in range(60) if n % 7]
    assert rejected == {"a.warc": "media_type"}
