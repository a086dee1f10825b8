"""Formats: what was written is read, in one piece and in blocks of any size; bad records are yielded with a reason."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import sys
import tarfile
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

from whorl.data import files
from whorl.data.formats import FORMATS, Format, Record, format_name, open_format
from whorl.data.formats.jsonl import parse_object
from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError

MARK = "\ufeff"  # at the start of a text, a byte-order mark
TEXT = st.text(st.characters(codec="utf-8", exclude_characters=MARK), max_size=40)


def jsonl(path: Path, texts: list[str]) -> None:
    path.write_bytes(
        b"".join(json.dumps({"text": t}).encode() + b"\r\n"[n % 2 :] for n, t in enumerate(texts))
    )


def parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=3)


def arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def tar(path: Path, texts: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for n, text in enumerate(texts):
            suffix, content = ("txt", text) if n % 2 else ("json", json.dumps({"text": text}))
            info = tarfile.TarInfo(
                "long" * (n % 40) + f"{n}.{suffix}"
            )  # long names have headers of their own
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))


WRITERS: dict[str, Any] = {f".{w.__name__}": w for w in (jsonl, parquet, arrow, tar)}


def read_blocks(path: Path | str, block_bytes: int) -> list[Record]:
    reader = open_format(str(path))
    return [
        r for b in reader.blocks(str(path), block_bytes) for r in reader.records(str(path), b.start, b.stop)
    ]


def texts_of(records: list[Record]) -> list[Any]:
    return [r.value.reason if isinstance(r.value, BadRecordError) else r.value["text"] for r in records]


@pytest.mark.parametrize("suffix", WRITERS)
@given(texts=st.lists(TEXT, max_size=30), block_bytes=st.integers(1, 3000))
@settings(max_examples=40)
def test_blocks_give_every_record_once(suffix: str, texts: list[str], block_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        WRITERS[suffix](path, texts)
        whole = list(open_format(str(path)).records(str(path)))
        parts = read_blocks(path, block_bytes)
    assert texts_of(whole) == texts == texts_of(parts)
    assert [(r.offset, r.length, r.end) for r in parts] == [(r.offset, r.length, r.end) for r in whole]
    assert all(a.end <= b.offset for a, b in itertools.pairwise(whole))


LINES = st.lists(
    st.binary(max_size=30)
    | st.sampled_from([b"{}", b'{"text": "a"}', b"", b" ", b'{"x": "%s"}' % (b"y" * 90)])
)


@given(lines=LINES, block_bytes=st.integers(1, 200))
def test_jsonl_blocks_equal_whole_for_any_bytes(lines: list[bytes], block_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"\n".join(lines))
        reader = FORMATS.get("jsonl")(longest=64)
        whole = list(reader.records(str(path)))
        parts = [
            r
            for b in reader.blocks(str(path), block_bytes)
            for r in reader.records(str(path), b.start, b.stop)
        ]

    def content(r: Record) -> Any:
        return (r.offset, r.length, r.value.reason if isinstance(r.value, BadRecordError) else r.value)

    assert [content(r) for r in parts] == [content(r) for r in whole]


@given(st.binary(max_size=100) | TEXT.map(str.encode))
def test_text_is_decoded_or_rejected(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.md")
        path.write_bytes(data)
        (record,) = read_blocks(path, 10) or list(open_format(str(path)).records(str(path)))
    if isinstance(record.value, BadRecordError):
        assert record.value.reason == ("binary" if b"\0" in data else "invalid_utf8")
    else:
        assert record.value["text"].encode() == data[record.offset :]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.floats() | st.text(), max_size=4) | JSON)
def test_parse_object_equals_the_standard_library(value: object) -> None:
    found = parse_object(json.dumps(value).encode())
    if isinstance(value, dict):
        assert json.dumps(found) == json.dumps(value)
    else:
        assert isinstance(found, BadRecordError) and found.reason == "bad_json"


@pytest.mark.parametrize("suffix", [*WRITERS, ".md"])
def test_same_records_from_url_and_compressed(tmp_path: Path, suffix: str) -> None:
    texts = ["one", "zwei", "trois"] if suffix != ".md" else ["one"]
    path = tmp_path / f"a{suffix}"
    WRITERS.get(suffix, lambda p, t: p.write_text(t[0]))(path, texts)
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/formats/a{suffix}", path.read_bytes())
    urls = [f"memory://formats/a{suffix}", path.as_uri()]
    if suffix in (".jsonl", ".tar", ".md"):
        path.with_name(f"b{suffix}.gz").write_bytes(gzip.compress(path.read_bytes()))
        memory.pipe(f"/formats/b{suffix}.zst", zstandard.compress(path.read_bytes()))
        urls += [str(tmp_path / f"b{suffix}.gz"), f"memory://formats/b{suffix}.zst"]
    for url in urls:
        assert texts_of(read_blocks(url, 20)) == texts, url


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet", ".tar", ".arrow"])
def test_damage_is_one_last_record(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"neither this nor that, but long enough" * 20)
    (record,) = open_format(str(path)).records(str(path))
    assert isinstance(record.value, BadRecordError) and record.value.reason == "damaged"
    (record,) = open_format(str(path)).records(str(tmp_path / f"none{suffix}"))
    assert isinstance(record.value, BadRecordError) and record.value.reason == "unreadable"


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("zst", zstandard.compress)]
)
def test_members_of_a_compressed_file_are_joined(tmp_path: Path, suffix: str, compress: Any) -> None:
    lines = [json.dumps({"text": str(n)}).encode() + b"\n" for n in range(4)]
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(b"".join(compress(part) for part in (lines[0], b"", lines[1] + lines[2], lines[3])))
    assert texts_of(list(open_format(str(path)).records(str(path)))) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("way", ["a dictionary", "a type of dictionary", "compression"])
def test_columnar_bomb_ends_the_file(
    tmp_path: Path, suffix: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 20)
    repeated = way != "compression"
    texts = ["x" * 10_000 if repeated else f"{n}" + "x" * 10_000 for n in range(1000)]
    column = pa.array(texts).dictionary_encode() if way == "a type of dictionary" else texts
    table, path = pa.table({"text": column}), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", use_dictionary=repeated, row_group_size=100)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
    reader = open_format(str(path))
    for start, stop in [(0, None), (3, 4)] if suffix == ".parquet" else [(0, None)]:
        *_, last = reader.records(str(path), start, stop)
        assert isinstance(last.value, BadRecordError) and "when decompressed" in str(last.value)
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 28)
    assert len(texts_of(list(reader.records(str(path))))) == 1000


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    contents = {"a.txt": f"{MARK}x", "a.jsonl": MARK + '{"text": "x"}', "a.json": MARK + '[{"text": "x"}]'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        reader = open_format(str(tmp_path / name), {".json": "jsonl"})
        assert texts_of(list(reader.records(str(tmp_path / name)))) == ["x"], name
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
        archive.add(tmp_path / "a.jsonl", "b.json")
    reader = open_format("a.tar")
    assert texts_of(list(reader.records(str(tmp_path / "a.tar")))) == ["x", "x"]


def test_tar_rejects_long_members_unread(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", ["x", "y" * 100, "z"])
    reader = FORMATS.get("tar")(longest=50)
    assert texts_of(list(reader.records(str(tmp_path / "a.tar")))) == ["x", "too_large", "z"]


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"pip install 'whorl\[s3\]'"):
        list(open_format("s3://bucket/a.jsonl").records("s3://bucket/a.jsonl"))
    with pytest.raises(ConfigError, match="protocol"):
        list(open_format("nonsense://a.jsonl").records("nonsense://a.jsonl"))


class Fortune(Format):
    """Texts between lines with a percent sign."""

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        offset = 0
        for number, text in enumerate(Path(uri).read_text().split("\n%\n"), 1):
            length = len(text.encode())
            yield Record(number, offset, length, {self.text_field: text}, offset + length + 3)
            offset += length + 3


def test_format_from_outside_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.fortune"
    path.write_text("one\n%\ntwo")
    formats = {".fortune": f"{__name__}:Fortune"}
    assert texts_of(list(open_format(str(path), formats).records(str(path)))) == ["one", "two"]
    assert format_name(str(path)) == "text" and format_name("a.jsonl.gz") == "jsonl"
    with pytest.raises(ConfigError, match="format 'nowhere:Fortune' cannot be imported"):
        open_format(str(path), {".fortune": "nowhere:Fortune"})
