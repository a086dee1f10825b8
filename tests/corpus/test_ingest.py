"""Ingest: every format, bad input, and provenance that locates the original bytes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus import IngestConfig, fingerprint, ingest
from whorl.corpus.documents import REJECT_REASONS, document_id
from whorl.corpus.sources import matches
from whorl.errors import ConfigError, DataError
from whorl.tracking.progress import Progress

Rows = list[dict[str, Any]]


def run(out: Path, *sources: Path | str, **options: Any) -> tuple[Rows, Rows, dict[str, Any]]:
    """Ingest `sources`; return documents, quarantine and summary."""
    out.mkdir(exist_ok=True)
    config = IngestConfig(sources=[str(s) for s in sources], **options)
    summary = ingest(config, out, Progress.silent())
    rows = [row for f in sorted(out.glob("documents-*.parquet")) for row in pq.read_table(f).to_pylist()]
    quarantine = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert {q["reason"] for q in quarantine} <= set(REJECT_REASONS)
    assert summary["documents"] == len(rows)
    assert sum(c["documents"] for c in summary["quarantine"].values()) == len(quarantine)
    assert summary["funnel"][0]["documents"] == len(rows) + len(quarantine)
    return rows, quarantine, summary


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def test_ingest_text_folder(data: Path, out: Path) -> None:
    (data / "b.md").write_text("# Grüße\r\nzweite Zeile")
    (data / "sub").mkdir()
    (data / "sub/a.py").write_text("# SPDX-License-Identifier: MIT\nx = 1\n")
    (data / ".git").mkdir()
    (data / ".git/config").write_text("ignored")
    rows, quarantine, summary = run(out, data, licences={str(data): "CC0-1.0"})
    assert [(r["path"], r["licence"], r["language"]) for r in rows] == [
        ("b.md", "CC0-1.0", "markdown"),
        ("sub/a.py", "MIT", "python"),
    ]
    assert rows[0]["text"].encode() == (data / "b.md").read_bytes()
    assert rows[0]["id"] == document_id(str(data), "b.md", 0)
    assert not quarantine
    assert summary["licences"]["MIT"]["documents"] == 1


def test_ingest_file_and_globs(data: Path, out: Path) -> None:
    for name in ("a.txt", "b.txt", "c.md"):
        (data / name).write_text(f"text of {name}")
    (data / "deep").mkdir()
    (data / "deep/d.txt").write_text("deep text")
    assert [r["path"] for r in run(out, data / "c.md")[0]] == ["c.md"]
    assert [r["path"] for r in run(out, data / "*.txt")[0]] == ["a.txt", "b.txt"]
    assert [r["path"] for r in run(out, data / "**/*.txt")[0]] == ["a.txt", "b.txt", "deep/d.txt"]
    rows, _, summary = run(out, data, include=["*.txt"], exclude=["deep", "b*"])
    assert [r["path"] for r in rows] == ["a.txt"]
    assert summary["excluded_files"] == 2


def test_ingest_strips_byte_order_mark(data: Path, out: Path) -> None:
    (data / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    ((row,), _, _) = run(out, data)
    assert (row["text"], row["offset"], row["length"]) == ("hello", 3, 5)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_offsets_locate_records(data: Path, out: Path, suffix: str) -> None:
    raw = lines({"text": "first"}, {"text": "zwölf", "license": "MIT"}) + b"\n" + lines({"text": "third"})
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    (data / f"a.jsonl{suffix}").write_bytes(pack(raw))
    rows, quarantine, _ = run(out, data)
    assert [r["text"] for r in rows] == ["first", "zwölf", "third"]
    assert [r["licence"] for r in rows] == [None, "MIT", None]
    assert not quarantine
    for row in rows:
        assert json.loads(raw[row["offset"] : row["offset"] + row["length"]])["text"] == row["text"]


def test_jsonl_concatenated_streams(data: Path, out: Path) -> None:
    one, two = lines({"text": "one"}), lines({"text": "two"})
    (data / "a.jsonl.gz").write_bytes(gzip.compress(one) + gzip.compress(two))
    (data / "b.jsonl.zst").write_bytes(zstandard.compress(one) + zstandard.compress(two))
    assert [r["text"] for r in run(out, data)[0]] == ["one", "two"] * 2


def test_jsonl_quarantines_bad_records(data: Path, out: Path) -> None:
    good = lines({"text": "good"})
    bad = {
        b"{not json\n": "bad_json",
        b"[1]\n": "bad_json",
        b"[" * 100_000 + b"\n": "bad_json",
        b'{"other": 1}\n': "no_text_field",
        b'{"text": 7}\n': "no_text_field",
        b'{"text": "\\ud800"}\n': "invalid_utf8",
        b'{"text": "\xff"}\n': "invalid_utf8",
        b'{"text": "a\\u0000b"}\n': "binary",
        b'{"text": "  "}\n': "empty",
        b'{"text": "' + b"x" * 2000 + b'"}\n': "too_large",
    }
    (data / "a.jsonl").write_bytes(b"".join(good + record for record in bad) + good)
    rows, quarantine, _ = run(out, data, max_document_bytes=1000)
    assert len(rows) == len(bad) + 1
    assert [q["reason"] for q in quarantine] == list(bad.values())
    raw = (data / "a.jsonl").read_bytes()
    for found, record in zip(quarantine, bad, strict=True):
        assert raw[found["offset"] : found["offset"] + found["length"]] == record.rstrip(b"\n")


def test_parquet_rows_and_missing_column(data: Path, out: Path) -> None:
    table = pa.table({"n": [1, 2, 3], "body": ["first", None, "third"], "license": ["MIT", None, None]})
    pq.write_table(table, data / "a.parquet")
    rows, quarantine, _ = run(out, data, text_field="body")
    assert [(r["text"], r["offset"], r["licence"]) for r in rows] == [("first", 0, "MIT"), ("third", 2, None)]
    assert [(q["reason"], q["offset"]) for q in quarantine] == [("no_text_field", 1)]
    with pytest.raises(DataError, match="no column 'text' among n, body, license"):
        run(out, data)


def test_invalid_utf8_detail_names_byte(data: Path, out: Path) -> None:
    (data / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (data / "good.py").write_text("x = 1\n")
    rows, (bad,), _ = run(out, data)
    assert [r["path"] for r in rows] == ["good.py"]
    assert bad["reason"] == "invalid_utf8"
    assert bad["detail"].startswith("byte 28:")


@pytest.mark.parametrize("cut", [1, 4, 5000])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_stream_keeps_complete_records(data: Path, out: Path, suffix: str, cut: int) -> None:
    raw = lines(*({"text": os.urandom(2000).hex()} for _ in range(100)))
    packed = gzip.compress(raw) if suffix == ".gz" else zstandard.compress(raw)
    (data / f"a.jsonl{suffix}").write_bytes(packed[:-cut])
    (data / "b.txt").write_text("more")
    rows, (bad,), _ = run(out, data)
    assert bad["reason"] == "damaged"
    expected = [json.loads(line)["text"] for line in raw.splitlines()]
    assert [r["text"] for r in rows] == [*expected[: len(rows) - 1], "more"]
    assert 10 < len(rows) <= 100
    assert bad["offset"] == sum(len(line) + 1 for line in raw.splitlines()[: len(rows) - 1])


def test_wrong_suffix_is_damaged(data: Path, out: Path) -> None:
    (data / "a.txt.gz").write_bytes(b"no gzip at all")
    (data / "b.jsonl.zst").write_bytes(b"nor zstandard")
    (data / "c.txt").write_text("text")
    rows, quarantine, _ = run(out, data)
    assert [r["path"] for r in rows] == ["c.txt"]
    assert [q["reason"] for q in quarantine] == ["damaged", "damaged"]


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_truncated_parquet_is_damaged(data: Path, out: Path, keep: float) -> None:
    pq.write_table(pa.table({"text": [os.urandom(100).hex() for _ in range(500)]}), data / "a.parquet")
    whole = (data / "a.parquet").read_bytes()
    (data / "a.parquet").write_bytes(whole[: int(len(whole) * keep)])
    (data / "b.txt").write_text("text")
    rows, (bad,), _ = run(out, data)
    assert [r["path"] for r in rows] == ["b.txt"]
    assert (bad["path"], bad["reason"]) == ("a.parquet", "damaged")


def test_parquet_damaged_page_keeps_earlier_rows(data: Path, out: Path) -> None:
    texts = [os.urandom(500).hex() for _ in range(2000)]
    pq.write_table(pa.table({"text": texts}), data / "a.parquet", compression="zstd", row_group_size=200)
    raw = bytearray((data / "a.parquet").read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 2000] = bytes(2000)
    (data / "a.parquet").write_bytes(raw)
    rows, (bad,), _ = run(out, data)
    assert bad["reason"] == "damaged"
    assert [r["text"] for r in rows] == texts[: len(rows)]


def make_bad_sources(data: Path) -> None:
    """Folders that `ingest` rejects as a whole, below `data`."""
    for name in ("empty", "filtered", "binary", "novels"):
        (data / name).mkdir()
    (data / "filtered/x.bin").write_bytes(b"\0")
    for i in range(5):
        (data / f"binary/{i}.bin").write_bytes(b"\x7fELF\0" + os.urandom(10_000))
    (data / "binary/late.bin").write_bytes(b"x" * 20_000 + b"\0")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("{data}/empty", {}, "the folder is empty"),
        ("{data}/filtered", {"include": ["*.txt"]}, "all 1 files in it are excluded"),
        ("{data}/binary", {}, r"none of the 6 files .* binary 6"),
        ("pyhton-stdlib", {}, r"did you mean 'python-stdlib'\?"),
        ("{data}/novel", {}, r"similar: .*novels"),
        ("s3://bucket/texts", {}, "local files"),
        ("{data}/novels", {"licences": {"elsewhere": "MIT"}}, "not among the sources"),
    ],
)
def test_ingest_rejects_source(
    data: Path, out: Path, source: str, options: dict[str, Any], message: str
) -> None:
    make_bad_sources(data)
    with pytest.raises((DataError, ConfigError), match=message):
        run(out, source.format(data=data), **options)


def test_pipe_and_broken_link_are_quarantined(data: Path, out: Path) -> None:
    os.mkfifo(data / "pipe.txt")
    (data / "link.txt").symlink_to("nowhere")
    (data / "good.txt").write_text("good")
    rows, quarantine, _ = run(out, data)
    assert [r["path"] for r in rows] == ["good.txt"]
    assert [q["reason"] for q in quarantine] == ["not_a_file", "not_a_file"]


def test_non_utf8_file_name_is_escaped(data: Path, out: Path) -> None:
    Path(os.fsdecode(os.fsencode(data) + b"/caf\xe9.txt")).write_text("text")
    assert [r["path"] for r in run(out, data)[0]] == ["caf\\xe9.txt"]
    assert fingerprint(IngestConfig(sources=[str(data)]))


PEAK = """
import sys, zstandard
from pathlib import Path
from whorl.corpus import IngestConfig, ingest, fingerprint
from whorl.tracking.progress import Progress
out, *sources = sys.argv[1:]
def peak():  # not ru_maxrss: a child starts with that of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
before = peak()
config = IngestConfig(sources=sources)
ingest(config.model_copy(update={"fingerprint": fingerprint(config)}), Path(out), Progress.silent())
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_huge_line_and_bomb_need_bounded_memory(data: Path, out: Path) -> None:
    """A sparse 2 GB file as text and as one JSONL line, and a zstd bomb: all are quarantined by size."""
    for name in ("huge.txt", "huge.jsonl"):
        with (data / name).open("wb") as stream:
            stream.truncate(2_000_000_000)
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(b"a" * 10_000_000) for _ in range(50)) + packer.flush()
    (data / "bomb.jsonl.zst").write_bytes(bomb)
    (data / "bomb.txt.zst").write_bytes(bomb)
    (data / "good.txt").write_text("good")
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, out, data], capture_output=True, text=True, check=True, timeout=100
    )
    quarantine = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert {q["path"]: q["reason"] for q in quarantine} == dict.fromkeys(
        ["huge.txt", "huge.jsonl", "bomb.jsonl.zst", "bomb.txt.zst"], "too_large"
    )
    assert next(q["length"] for q in quarantine if q["path"] == "huge.jsonl") == 2_000_000_000
    assert int(done.stdout) < 250_000_000


def test_row_groups_are_bounded_in_bytes(data: Path, out: Path) -> None:
    for i in range(12):
        (data / f"{i:02d}.txt").write_text(f"{i} " * 500_000)
    run(out, data)
    file = pq.ParquetFile(out / "documents-00000.parquet")
    sizes = [file.metadata.row_group(g).total_byte_size for g in range(file.num_row_groups)]
    assert len(sizes) > 2
    assert max(sizes) < 6_000_000


def test_ingest_is_deterministic(data: Path, tmp_path: Path) -> None:
    for i in range(20):
        (data / f"{i}.txt").write_text(f"text {i}")
    first, second = tmp_path / "1", tmp_path / "2"
    run(first, data)
    run(second, data)
    name = "documents-00000.parquet"
    assert (first / name).read_bytes() == (second / name).read_bytes()


def test_fingerprint_depends_on_bytes_and_names(data: Path, out: Path) -> None:
    config = IngestConfig(sources=[str(data)])
    (data / "a.txt").write_text("one")
    before = fingerprint(config)
    os.utime(data / "a.txt", (1, 1))
    assert fingerprint(config) == before
    stamp = (data / "a.txt").stat().st_mtime_ns
    (data / "a.txt").write_text("two")
    os.utime(data / "a.txt", ns=(stamp, stamp))
    assert fingerprint(config) != before
    with pytest.raises(DataError, match="changed while they were read"):
        run(out, data, fingerprint=before)
    changed = fingerprint(config)
    (data / "a.txt").rename(data / "b.txt")
    assert fingerprint(config) != changed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=40), st.binary(max_size=40), st.integers()), min_size=1, max_size=8)
)
def test_jsonl_accounts_for_every_line(values: list[Any]) -> None:
    """Each line becomes one document or one rejection, and later lines are still read."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "a.jsonl"), Path(folder, "out")
        records = [
            v.replace(b"\n", b"?") if isinstance(v, bytes) else json.dumps({"text": v}).encode()
            for v in values
        ]
        path.write_bytes(b"\n".join([*records, b'{"text": "end"}']))
        rows, quarantine, _ = run(out, path)
        texts = [v for v in values if isinstance(v, str) and v and not v.isspace() and "\0" not in v]
        assert [r["text"] for r in rows] == [*texts, "end"]
        blank = sum(not record.strip() for record in records)
        assert len(rows) + len(quarantine) + blank == len(values) + 1


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("a/b/c.py", "*.py", True),
        ("a/b/c.py", "a/*.py", False),
        ("a/b/c.py", "a/**/*.py", True),
        ("a/c.py", "a/**/*.py", True),
        ("a/b/c.py", "**/b/*", True),
        ("a/b/c.py", "a/**", True),
        ("c1.py", "c[0-3].py", True),
        ("c1.py", "c[!0-3].py", False),
        ("cpy", "c.py", False),
        ("c.py", "?.py", True),
    ],
)
def test_matches_glob(path: str, pattern: str, expected: bool) -> None:
    assert matches(path, [pattern]) is expected
