"""Ingest: every format, bad input, and provenance that locates the original bytes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus import IngestConfig, fingerprint, ingest
from whorl.corpus.documents import document_id
from whorl.corpus.sources import matches
from whorl.data.formats import Format, Record
from whorl.data.quarantine import REASONS
from whorl.errors import ConfigError, DataError
from whorl.tracking.progress import Progress

Rows = list[dict[str, Any]]
MODULE: Any = sys.modules[ingest.__module__]  # the name in the package is the function


def run(data: Path, *sources: Path | str, out: str = "out", **options: Any) -> tuple[Rows, Rows, Any]:
    """Ingest `sources`, or the folder `data`, into a folder beside it; return documents, quarantine and summary."""
    folder = data.parent / out
    folder.mkdir(exist_ok=True)
    config = IngestConfig(sources=[str(s) for s in sources or [data]], **options)
    summary = ingest(config, folder, Progress.silent())
    rows = [row for f in sorted(folder.glob("documents-*.parquet")) for row in pq.read_table(f).to_pylist()]
    quarantine = quarantined(folder)
    assert {q["reason"] for q in quarantine} <= set(REASONS)
    assert summary["documents"] == len(rows)
    assert sum(c["documents"] for c in summary["quarantine"].values()) == len(quarantine)
    assert summary["funnel"][0]["documents"] == len(rows) + len(quarantine)
    return rows, quarantine, summary


def quarantined(out: Path) -> Rows:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def column(rows: Rows, name: str) -> list[Any]:
    return [row[name] for row in rows]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def test_ingest_text_folder(data: Path) -> None:
    files = {"b.md": "# Grüße\r\nzweite Zeile", "sub/a.py": "# SPDX-License-Identifier: MIT\nx = 1\n"}
    write(data, {**files, ".git/config": "ignored"})
    rows, quarantine, summary = run(data, licences={str(data): "CC0-1.0"})
    found = [(r["path"], r["licence"], r["language"]) for r in rows]
    assert found == [("b.md", "CC0-1.0", "markdown"), ("sub/a.py", "MIT", "python")]
    assert column(rows, "text") == list(files.values())
    assert rows[0]["id"] == document_id(str(data), "b.md", 0)
    assert not quarantine and summary["licences"]["MIT"]["documents"] == 1


def test_ingest_file_and_globs(data: Path) -> None:
    write(data, {name: f"text of {name}" for name in ("a.txt", "b.txt", "c.md", "deep/d.txt")})
    expected = {"c.md": ["c.md"], "*.txt": ["a.txt", "b.txt"], "**/*.txt": ["a.txt", "b.txt", "deep/d.txt"]}
    for glob, paths in expected.items():
        assert column(run(data, data / glob)[0], "path") == paths
    rows, _, summary = run(data, include=["*.txt"], exclude=["deep", "b*"])
    assert column(rows, "path") == ["a.txt"] and summary["excluded_files"] == 2


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", PACK)
def test_jsonl_offsets_locate_records(data: Path, suffix: str) -> None:
    raw = lines({"text": "first"}, {"text": "zwölf", "license": "MIT"}) + b"\n" + lines({"text": "third"})
    write(data, {f"a.jsonl{suffix}": PACK[suffix](raw)})
    rows, quarantine, _ = run(data)
    assert column(rows, "text") == ["first", "zwölf", "third"]
    assert column(rows, "licence") == [None, "MIT", None]
    assert not quarantine
    for row in rows:
        assert json.loads(raw[row["offset"] : row["offset"] + row["length"]])["text"] == row["text"]


def test_jsonl_quarantines_bad_records(data: Path) -> None:
    good = lines({"text": "good"})
    bad = {
        b"{not json\n": "bad_json", b"[1]\n": "bad_json", b"[" * 100_000 + b"\n": "bad_json",
        b'{"other": 1}\n': "no_text_field", b'{"text": 7}\n': "no_text_field",
        b'{"text": "\\ud800"}\n': "invalid_utf8", b'{"text": "\xff"}\n': "invalid_utf8",
        b'{"text": "a\\u0000b"}\n': "binary", b'{"text": "  "}\n': "empty",
        b'{"text": "' + b"x" * 2000 + b'"}\n': "too_large",
    }  # fmt: skip
    raw = b"".join(good + record for record in bad) + good
    write(data, {"a.jsonl": raw})
    rows, quarantine, _ = run(data, max_document_bytes=1000)
    assert len(rows) == len(bad) + 1
    assert column(quarantine, "reason") == list(bad.values())
    found = [raw[q["offset"] : q["offset"] + q["length"]] for q in quarantine]
    assert found == [record.rstrip(b"\n") for record in bad]


def test_parquet_rows_and_missing_column(data: Path) -> None:
    table = pa.table({"n": [1, 2, 3], "body": ["first", None, "third"], "license": ["MIT", None, None]})
    pq.write_table(table, data / "a.parquet")
    rows, quarantine, _ = run(data, text_field="body")
    assert [(r["text"], r["offset"], r["licence"]) for r in rows] == [("first", 0, "MIT"), ("third", 2, None)]
    assert [(q["reason"], q["offset"]) for q in quarantine] == [("no_text_field", 1)]
    with pytest.raises(DataError, match="no column 'text' among n, body, license"):
        run(data)


def test_invalid_utf8_detail_names_byte(data: Path) -> None:
    write(data, {"latin.py": b"# -*- coding: latin-1 -*-\n# \xe9\n", "good.py": "x = 1\n"})
    rows, (bad,), _ = run(data)
    assert column(rows, "path") == ["good.py"]
    assert bad["reason"] == "invalid_utf8" and bad["detail"].startswith("byte 28:")


@pytest.mark.parametrize("cut", [1, 4, 5000])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_stream_keeps_complete_records(data: Path, suffix: str, cut: int) -> None:
    records = [lines({"text": os.urandom(2000).hex()}) for _ in range(100)]
    write(data, {f"a.jsonl{suffix}": PACK[suffix](b"".join(records))[:-cut], "b.txt": "more"})
    rows, (bad,), _ = run(data)
    kept = records[: len(rows) - 1]
    assert column(rows, "text") == [*(json.loads(record)["text"] for record in kept), "more"]
    assert 10 < len(rows) <= 100
    assert bad["reason"] == "damaged" and bad["offset"] == sum(map(len, kept))
    assert f"ends or is damaged after {len(kept)} records, the rest is lost" in bad["detail"]


def test_wrong_suffix_is_damaged(data: Path) -> None:
    write(data, {"a.txt.gz": b"no gzip at all", "b.jsonl.zst": b"nor zstandard", "c.txt": "text"})
    rows, quarantine, _ = run(data)
    assert column(rows, "path") == ["c.txt"]
    assert column(quarantine, "reason") == ["damaged", "damaged"]
    progress, log = Progress.silent(), list[str]()
    progress.sinks.append(log.append)
    ingest(IngestConfig(sources=[str(data)]), data.parent / "again", progress)
    damaged = [line for line in log if line.startswith("    damaged: ")]
    assert [line.split()[1] for line in damaged] == ["a.txt.gz:", "b.jsonl.zst:"]
    assert all("after 0 records, the rest is lost: " in line for line in damaged)


def test_parquet_damaged_page_keeps_earlier_rows(data: Path) -> None:
    texts = [os.urandom(500).hex() for _ in range(2000)]
    pq.write_table(pa.table({"text": texts}), data / "a.parquet", compression="zstd", row_group_size=200)
    raw = bytearray((data / "a.parquet").read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 2000] = bytes(2000)
    (data / "a.parquet").write_bytes(raw)
    rows, (bad,), _ = run(data)
    assert bad["reason"] == "damaged"
    assert column(rows, "text") == texts[: len(rows)]


@pytest.fixture
def bad_sources(data: Path) -> Path:
    """Folders that `ingest` rejects as a whole."""
    binaries = {f"binary/{i}.bin": b"\x7fELF\0" + os.urandom(10_000) for i in range(5)}
    write(data, {"filtered/x.bin": b"\0", **binaries, "binary/late.bin": b"x" * 20_000 + b"\0"})
    write(data, {"utf16/a.txt": "text".encode("utf-16"), "tar/a.txt": b"a".ljust(257, b"\0") + b"ustar"})
    write(data, {"fields/a.jsonl": b'{"body": "x"}\n', "nothing/a.jsonl": b""})
    (data / "empty").mkdir()
    (data / "novels").mkdir()
    return data


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("{data}/empty", {}, "the folder is empty"),
        ("{data}/filtered", {"include": ["*.txt"]}, "all 1 files in it are excluded"),
        ("{data}/binary", {}, r"none of the 6 files .* binary 6"),
        ("{data}/utf16", {}, "(?s)this is UTF-16.*iconv"), ("{data}/tar", {}, "(?s)this is a tar archive"),
        ("{data}/fields", {}, "(?s)fields: body; expected text; .*/data.md; ingest.text_field names"),
        ("{data}/nothing", {}, "has a document: all are empty\n  expected: [^\n]*$"),
        ("pyhton-stdlib", {}, r"did you mean 'python-stdlib'\?"), ("{data}/novel", {}, r"similar: .*novels"),
        ("memory://nowhere/texts", {}, "does not exist"), ("nonsense://texts", {}, "check the protocol"),
        ("{data}/novels", {"licences": {"elsewhere": "MIT"}}, "not among the sources"),
    ],
)  # fmt: skip
def test_ingest_rejects_source(bad_sources: Path, source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        run(bad_sources, source.format(data=bad_sources), **options)


def test_pipe_and_broken_link_are_quarantined(data: Path) -> None:
    os.mkfifo(data / "pipe.csv")
    (data / "link.txt").symlink_to("nowhere")
    write(data, {"good.txt": "good"})
    rows, quarantine, _ = run(data)
    assert column(rows, "path") == ["good.txt"]
    assert column(quarantine, "reason") == ["not_a_file", "not_a_file"]


def test_non_utf8_file_name_is_escaped(data: Path) -> None:
    write(data, {os.fsdecode(b"caf\xe9.txt"): "text"})
    assert column(run(data)[0], "path") == ["caf\\xe9.txt"]
    assert fingerprint(IngestConfig(sources=[str(data)]))


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BLOCK_BYTES", 5000)


def mixed_sources(data: Path) -> IngestConfig:
    """Files larger and smaller than a block, of every format, with bad records."""
    records = [lines({"text": f"text {n} " * (n % 40), "license": "MIT"}) for n in range(200)]
    records[50] = b"{broken\n"
    write(
        data, {"a.jsonl": b"".join(records), "b.jsonl.gz": gzip.compress(b"".join(records)), "bad.bin": b"\0"}
    )
    write(data, {f"{n}.txt": f"file {n} " * 100 * n for n in range(20)})
    table = pa.table({"text": [f"row {n} " * 30 for n in range(300)]})
    pq.write_table(table, data / "c.parquet", row_group_size=20)
    return IngestConfig(sources=[str(data)])


@pytest.mark.usefixtures("small_blocks")
def test_any_number_of_workers_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    config, found = mixed_sources(data), []
    for workers in (1, 2, 3):
        out = tmp_path / f"workers{workers}"
        out.mkdir()
        found.append((ingest(config, out, Progress.silent(), workers=workers), tree(out)))
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) > 5 and found[0][0]["quarantine"]["bad_json"]["documents"] == 2


@settings(max_examples=25)
@given(st.lists(st.text(max_size=30) | st.integers(), min_size=1, max_size=20), st.integers(1, 300))
def test_block_size_changes_no_document(values: list[Any], block_bytes: int) -> None:
    found = []
    for size in (block_bytes, 1 << 20):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(MODULE, "BLOCK_BYTES", size)
            data = Path("data")
            base = Path(folder, "in")
            write(base, {"a.jsonl": lines(*({"text": v} for v in values)), "b.txt": "b" * 99, "c.txt": "end"})
            rows, quarantine, _ = run(base)
            found.append([{**r, "source": data, "id": 0} for r in rows + quarantine])
    assert found[0] == found[1]


@pytest.mark.usefixtures("small_blocks")
def test_only_blocks_around_a_changed_file_are_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(data, {f"{n:03d}.txt": f"file {n} " * 40 for n in range(400)})
    read, done = MODULE.read_block, []

    def counted(*args: Any) -> Any:
        done.append(args)
        return read(*args)

    monkeypatch.setattr(MODULE, "read_block", counted)

    def rows(out: str, **options: Any) -> list[str]:
        (tmp_path / out).mkdir()
        done.clear()
        config = IngestConfig(sources=[str(data)], **options)
        ingest(config, tmp_path / out, Progress.silent(), units=tmp_path / "units")
        files = sorted((tmp_path / out).glob("documents-*.parquet"))
        return [path for f in files for path in pq.read_table(f)["path"].to_pylist()]

    assert len(rows("first")) == 400
    total = len(done)
    write(data, {"200.txt": "fine 200 " * 40})
    assert len(rows("changed")) == 400 and len(done) == 1
    write(data, {"2005.txt": "added " * 40})
    (data / "300.txt").unlink()
    found = rows("added")
    assert "2005.txt" in found and "300.txt" not in found and 2 <= len(done) < 10 < total / 4
    assert len(rows("with a folder that is left out", exclude=["nothing"])) == 400 and not done
    rows("another limit", max_document_bytes=10_000)
    assert len(done) == total or len(done) > total - 3


def test_ingest_reads_urls(data: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/sub/a.md", b"one")
    memory.pipe("/texts/b.jsonl", lines({"text": "two"}))
    for source in ("memory://texts", "memory://texts/**"):
        rows, _, _ = run(data, source)
        assert [(r["path"], r["text"]) for r in rows] == [("b.jsonl", "two"), ("sub/a.md", "one")]
        assert rows[0]["source"] == source
    assert column(run(data, "memory://texts/b.jsonl")[0], "path") == ["b.jsonl"]
    assert column(run(data, "memory://texts", include=["*.md"])[0], "path") == ["sub/a.md"]
    config = IngestConfig(sources=["memory://texts"])
    before = fingerprint(config)
    assert fingerprint(config) == before
    memory.pipe("/texts/b.jsonl", lines({"text": "new"}))
    assert fingerprint(config) != before


class Semicolons(Format):
    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        for n, text in enumerate(Path(uri).read_text().split(";")):
            yield Record(n + 1, n, len(text), {self.text_field: text}, n + 1)


def test_ingest_uses_a_format_from_outside(data: Path) -> None:
    write(data, {"a.semi": "one;two; "})
    rows, (bad,), _ = run(data, formats={".semi": f"{__name__}:Semicolons"})
    assert column(rows, "text") == ["one", "two"] and bad["reason"] == "empty"
    with pytest.raises(ValueError, match="module:attribute"):
        IngestConfig(formats={".semi": "semi"})


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
def test_huge_line_and_bomb_need_bounded_memory(data: Path, tmp_path: Path) -> None:
    """A sparse file of 300 MB as text and as one JSONL line, and a zstd bomb: all are quarantined."""
    for name in ("huge.txt", "huge.jsonl"):
        with (data / name).open("wb") as stream:
            stream.truncate(300_000_000)
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(b"a" * 10_000_000) for _ in range(50)) + packer.flush()
    write(data, {"bomb.jsonl.zst": bomb, "bomb.txt.zst": bomb, "good.txt": "good"})
    command = [sys.executable, "-c", PEAK, tmp_path, data]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = {q["path"]: q for q in quarantined(tmp_path)}
    assert found.keys() == {"huge.txt", "huge.jsonl", "bomb.jsonl.zst", "bomb.txt.zst"}
    reasons = {path: q["reason"] for path, q in found.items()}
    # a decompressed file ends at the bound of its ratio, and a text file of NUL bytes at its first
    assert reasons == {
        "huge.txt": "binary", "huge.jsonl": "too_large", "bomb.jsonl.zst": "damaged", "bomb.txt.zst": "damaged",
    }  # fmt: skip
    assert found["huge.jsonl"]["length"] == 300_000_000
    assert int(done.stdout) < 250_000_000


def test_row_groups_are_bounded_in_bytes(data: Path, tmp_path: Path) -> None:
    write(data, {f"{i:02d}.txt": f"{i} " * 500_000 for i in range(12)})
    run(data)
    metadata = pq.ParquetFile(tmp_path / "out/documents-00000.parquet").metadata
    sizes = [metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)]
    assert len(sizes) > 2
    assert max(sizes) < 6_000_000


def test_fingerprint_depends_on_bytes_and_names(data: Path) -> None:
    config, path = IngestConfig(sources=[str(data)]), data / "a.txt"
    path.write_text("one")
    before = fingerprint(config)
    os.utime(path, (1, 1))
    assert fingerprint(config) == before
    stamp = path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(stamp, stamp))
    assert fingerprint(config) != before
    with pytest.raises(DataError, match="changed while they were read"):
        run(data, fingerprint=before)
    changed = fingerprint(config)
    path.rename(data / "b.txt")
    assert fingerprint(config) != changed


@given(st.lists(st.text(max_size=40) | st.binary(max_size=40) | st.integers(), min_size=1, max_size=8))
def test_jsonl_accounts_for_every_line(values: list[Any]) -> None:
    """Each line becomes one document or one rejection, and later lines are still read."""
    raw = [v.replace(b"\n", b"?") if isinstance(v, bytes) else lines({"text": v}).strip() for v in values]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"\n".join([*raw, b'{"text": "end"}']))
        rows, quarantine, _ = run(path)
    texts = [v for v in values if isinstance(v, str) and v and not v.isspace() and "\0" not in v]
    assert column(rows, "text") == [*texts, "end"]
    blank = sum(not record.strip() for record in raw)
    assert len(rows) + len(quarantine) + blank == len(values) + 1


MATCHING = [("a/b/c.py", "*.py"), ("a/b/c.py", "a/**/*.py"), ("a/c.py", "a/**/*.py"), ("a/b/c.py", "**/b/*")]
MATCHING += [("a/b/c.py", "a/**"), ("c1.py", "c[0-3].py"), ("c.py", "?.py")]
OTHERS = [("a/b/c.py", "a/*.py"), ("c1.py", "c[!0-3].py"), ("cpy", "c.py")]


@pytest.mark.parametrize(("path", "pattern"), MATCHING + OTHERS)
def test_matches_glob(path: str, pattern: str) -> None:
    assert matches(path, [pattern]) is ((path, pattern) in MATCHING)
