"""A folder as users have it: one file of each kind, secrets among them, and texts of any size."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.corpus.test_ingest import run
from tests.data.formats.test_documents import CELLS, docx, epub
from tests.data.formats.test_warc import page
from tests.data.test_extraction import pdf

from whorl.corpus.readers import divide
from whorl.data.secrets import has_secret_name, is_private_key

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n"


def write_folder(folder: Path) -> None:
    """Write a file of each kind."""
    folder.mkdir(exist_ok=True)
    (folder / "a.html").write_bytes(page("of a page"))
    (folder / "b.pdf").write_bytes(pdf([["of a PDF"]]))
    docx(folder / "c.docx", "<w:p><w:r><w:t>of Word</w:t></w:r></w:p>")
    epub(folder / "d.epub")
    (folder / "e.ipynb").write_text(json.dumps({"cells": CELLS[:1]}))
    (folder / "f.csv").write_text("title,text\nT,of a row\nU,of another\nV\n")
    (folder / "g.tsv").write_text("text\nof a tab\n")
    (folder / "h.csv").write_text("x,y\n1,2\n")
    (folder / "i.md").write_text("of Markdown")
    (folder / "j.jsonl").write_text('{"text": "of a line"}\n')
    (folder / ".env").write_text("TOKEN=hunter2")
    (folder / "server.key").write_text("hunter2")
    (folder / "note.txt").write_text(KEY)
    (folder / "about.txt").write_text(f"a key looks so:\n{KEY}")


def test_each_kind_is_read_and_secrets_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "data")
    rows, quarantine, summary = run(tmp_path / "data")
    found = [(r["path"], r["text"].strip(), r["title"], r["language"]) for r in rows]
    assert found == [
        ("a.html", "of a page", "T", None), ("about.txt", f"a key looks so:\n{KEY}".strip(), None, "text"),
        ("b.pdf", "of a PDF", None, None), ("c.docx", "of Word", None, None), ("d.epub", "eins\n\nzwei", "A book", None),
        ("e.ipynb", "# Title\ntext", None, "markdown"), ("f.csv", "of a row", "T", None), ("f.csv", "of another", "U", None),
        ("g.tsv", "of a tab", None, None), ("h.csv", "x,y\n1,2", None, "csv"), ("i.md", "of Markdown", None, "markdown"),
        ("j.jsonl", "of a line", None, None),
    ]  # fmt: skip
    assert [(q["path"], q["reason"]) for q in quarantine] == [
        (".env", "secret"), ("f.csv", "ragged"), ("note.txt", "secret"), ("server.key", "secret"),
    ]  # fmt: skip
    assert summary["quarantine"]["secret"]["documents"] == 3
    rows, quarantine, _ = run(tmp_path / "data", formats={".key": "text"}, include=["*.key"])
    assert [r["text"] for r in rows] == ["hunter2"] and not quarantine


def test_names_of_secrets() -> None:
    for name in (
        ".env",
        "a/.env.local",
        "prod.ENV",
        "id_rsa",
        "x/key.pem",
        ".netrc",
        ".aws/credentials",
        "secrets.yml",
    ):
        assert has_secret_name(name), name
    for name in (
        ".env.example",
        "secrets.py",
        "environment",
        "id_rsa.pub",
        "keys.md",
        "monkey.txt",
        "credentials.md",
    ):
        assert not has_secret_name(name), name
    pgp = KEY.replace("OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK").replace("b3B", "Version: a-b\n\nb3B")
    assert is_private_key(KEY) and is_private_key(f"\n{pgp}") and not is_private_key(f"text {KEY}")


@pytest.mark.parametrize("suffix", [".py", ".xml", ".csv", ".log"])
def test_text_of_any_suffix_and_size_is_divided(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("whorl.corpus.readers"), "SPLIT_READ_BYTES", 50_000)
    data = tmp_path / "data"
    data.mkdir()
    text = "".join(f"{'é' * (n % 50)},{n}\n" + "\n" * (n % 9 == 0) for n in range(3000)) + "字" * 30_000
    (data / f"large{suffix}").write_text(text)
    small = "x = 1\n" * 150
    (data / f"small{suffix}").write_text(small)
    rows, quarantine, _ = run(data, max_document_bytes=10_000)
    assert not quarantine
    parts = [row["text"] for row in rows if row["path"].startswith("large")]
    assert "".join(parts) == text and max(len(part.encode()) for part in parts) <= 10_000
    if suffix != ".log":
        assert [row["text"] for row in rows if row["path"].startswith("small")] == [small]
    assert run(data, max_document_bytes=10_000)[0] == rows
    (rejected,) = run(data, max_document_bytes=10_000, split_bytes=0)[1]
    assert rejected["reason"] == "too_large" and "split_bytes is 0" in rejected["detail"]


@given(st.text("ab \n\u00e9\U0001f600", max_size=400), st.integers(1, 40), st.integers(4, 80))
def test_parts_keep_the_limit_and_the_text(text: str, size: int, limit: int) -> None:
    parts = list(divide(text, size, limit))
    assert "".join(parts) == text == "".join(divide(text, size))
    assert all(len(part.strip().encode()) <= limit for part in parts)
