"""WARC: pages are read with their provenance; damage costs the damaged record, and nothing is lost silently."""

from __future__ import annotations

import gzip
import io
import itertools
import tempfile
import zlib
from pathlib import Path
from typing import Any

import brotli
import pytest
import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecordType
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.data import files
from whorl.data.formats import FORMATS, Record, open_format, warc
from whorl.data.quarantine import BadRecordError

URL = "https://example.org/page"


def page(text: str) -> bytes:
    return f"<html><head><title>T</title></head><body><main><p>{text}</p></main></body></html>".encode()


def frame(content: bytes, kind: str = "response", *, lie: int = 0, **headers: str) -> bytes:
    """A WARC record; `lie` is added to its Content-Length."""
    fields = {
        "WARC-Type": kind, "WARC-Target-URI": URL, "WARC-Date": "2026-11-24T00:00:00Z",
        "WARC-Record-ID": "<urn:uuid:1>", "Content-Type": "application/http; msgtype=response",
        **{name.replace("_", "-"): value for name, value in headers.items()}, "Content-Length": str(len(content) + lie),
    }  # fmt: skip
    return (
        ("WARC/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode()
        + content
        + b"\r\n\r\n"
    )


def http(
    body: bytes, content_type: str = "text/html; charset=utf-8", status: str = "200 OK", more: str = ""
) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{more}\r\n".encode() + body


def response(text: str, **options: Any) -> bytes:
    return frame(http(page(text)), **options)


def read(tmp_path: Path, data: bytes, name: str = "a.warc", **options: Any) -> list[Record]:
    (tmp_path / name).write_bytes(data)
    return list(FORMATS.get("warc")(**options).records(str(tmp_path / name)))


def outcome(record: Record) -> str:
    """The text, or the reason of a rejection."""
    return record.value.reason if isinstance(record.value, BadRecordError) else record.value["text"]


def test_page_has_text_and_provenance(tmp_path: Path) -> None:
    (record,) = read(tmp_path, response("Grüße aus der Stadt"))
    assert record.value == {
        "text": "Grüße aus der Stadt", "url": URL, "title": "T", "time": "2026-11-24T00:00:00Z", "media_type": "text/html",
    }  # fmt: skip
    assert (record.offset, record.end) == (0, (tmp_path / "a.warc").stat().st_size)


def test_kinds_of_records(tmp_path: Path) -> None:
    others = [frame(b"x", kind) for kind in ("warcinfo", "request", "metadata", "revisit")]
    wet = frame(b"plain text", "conversion", Content_Type="text/plain")
    resource = frame(page("a resource"), "resource", Content_Type="text/html")
    unknown, unread = frame(b"x", "continuation"), frame(http(b"body {}", "text/css"))
    missing = frame(http(page("not found"), status="404 Not Found"))
    found = read(tmp_path, b"".join([*others, wet, resource, unknown, unread, missing]))
    assert [outcome(r) for r in found] == [
        "plain text", "a resource", "bad_field", "media_type", "http_status",
    ]  # fmt: skip
    assert read(tmp_path, wet, "a.wet") and open_format("a.warc.wet.gz").extracts


@pytest.mark.parametrize("members", [True, False], ids=["a member per record", "one member"])
def test_compressed_archive(tmp_path: Path, members: bool) -> None:
    records = [response(f"page {n}") for n in range(3)]
    data = b"".join(map(gzip.compress, records)) if members else gzip.compress(b"".join(records))
    found = read(tmp_path, data, "a.warc.gz")
    assert [outcome(r) for r in found] == ["page 0", "page 1", "page 2"]
    assert [r.offset for r in found] == [0, len(records[0]), 2 * len(records[0])]


ENCODERS = {
    "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.compress,
    "DEFLATE": lambda b: zlib.compress(b, wbits=-15),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_content_encoding_is_undone(tmp_path: Path, name: str) -> None:
    header = f"Content-Encoding: {name}\r\n"
    encoded = frame(http(ENCODERS[name](page("decoded text")), more=header))
    stored_decoded = frame(http(page("stored decoded"), more=header))
    bomb = frame(http(ENCODERS[name](bytes(1 << 24)), more=header))
    found = read(tmp_path, encoded + stored_decoded + bomb, longest=1 << 20)
    assert [outcome(r) for r in found] == ["decoded text", "stored decoded", "too_large"]


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_all_members_of_a_body_are_read(tmp_path: Path, name: str) -> None:
    encode, header = ENCODERS[name], f"Content-Encoding: {name}\r\n"
    html = page("a text of two members")
    body = encode(b"") + encode(html[:50]) + encode(html[50:])
    padded = body + (b"garbage" if name == "gzip" else b"\x50\x2a\x4d\x18\x04\0\0\0skip")
    bombs = b"".join(encode(bytes(1 << 18)) for _ in range(64))
    data = b"".join(frame(http(part, more=header)) for part in (body, padded, bombs, body[:-3]))
    found = [outcome(record) for record in read(tmp_path, data, longest=1 << 20)]
    assert found == ["a text of two members"] * 2 + ["too_large", "damaged"]


@pytest.mark.parametrize("name", ["gzip", "br", "zstd"])
def test_truncated_body_is_rejected(tmp_path: Path, name: str) -> None:
    body = ENCODERS[name](page("many words " * 50))[:-9]
    (record,) = read(tmp_path, frame(http(body, more=f"Content-Encoding: {name}\r\n")))
    assert outcome(record) == "damaged"


def test_chunked_body_is_joined(tmp_path: Path) -> None:
    body = page("in two chunks")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:20], body[20:], b""))
    (record,) = read(tmp_path, frame(http(chunks, more="Transfer-Encoding: chunked\r\n")))
    assert outcome(record) == "in two chunks"


@pytest.mark.parametrize("lie", [-30, -1, 1, 3, 50, 10_000, 10**12])
@pytest.mark.parametrize("suffix", [".warc", ".warc.gz"])
def test_wrong_length_costs_one_record(tmp_path: Path, lie: int, suffix: str) -> None:
    records = [response("first"), response("second", lie=lie), *(response(f"page {n}") for n in range(3))]
    data = b"".join(records if suffix == ".warc" else map(gzip.compress, records))
    found = read(tmp_path, data, f"a{suffix}", longest=1 << 20)
    assert [outcome(r) for r in found] == ["first", "damaged", "page 0", "page 1", "page 2"]
    assert found[1].offset == len(records[0]) and found[1].length == len(records[1])


@pytest.mark.parametrize("length", ["", "-5", "x", "9" * 40])
def test_invalid_length_costs_one_record(tmp_path: Path, length: str) -> None:
    good, bad = response("good"), response("bad")
    start = bad.index(b"Content-Length: ")
    bad = bad[:start] + f"Content-Length: {length}".encode() + bad[bad.index(b"\r\n\r\n", start) :]
    assert [outcome(r) for r in read(tmp_path, good + bad + good)] == ["good", "damaged", "good"]


def test_garbage_between_records_is_rejected(tmp_path: Path) -> None:
    found = read(tmp_path, response("one") + b"junk\r\nmore\0junk\r\n\r\n" + response("two") + b"\r\n\r\n")
    assert [outcome(r) for r in found] == ["one", "damaged", "two"]


@pytest.mark.parametrize("suffix", [".warc", ".warc.gz"])
def test_truncated_archive_reports_the_end(tmp_path: Path, suffix: str) -> None:
    texts = [f"page {n} " + "words " * 500 for n in range(2)] + ["the last"]
    records = [response(text) for text in texts]
    packed = records if suffix == ".warc" else [gzip.compress(r) for r in records]
    whole, tail = b"".join(packed[:2]), packed[2]
    for cut in range(1, len(tail), 7):
        found = read(tmp_path, whole + tail[:cut], f"a{suffix}")
        reasons = [outcome(r) for r in found]
        assert reasons[:-1] == [text.strip() for text in texts[: len(reasons) - 1]], cut
        assert len(reasons) == 3 or (suffix == ".warc.gz" and len(reasons) == 2), cut
        if reasons[2:] != ["the last"]:  # a record may lack the line ends behind it
            assert reasons[-1] == "damaged", cut
    assert "the rest is lost" in read(tmp_path, whole + tail[:30], f"a{suffix}")[-1].value.detail  # type: ignore[union-attr]


def test_large_record_is_passed_over(tmp_path: Path) -> None:
    nested = frame(http(response("nested") * 2000, "application/warc"))
    found = read(tmp_path, response("one") + nested + response("two"), longest=10_000)
    assert [outcome(r) for r in found] == ["one", "too_large", "two"]
    assert found[1].length == len(nested)


def test_reopening_is_bounded(tmp_path: Path) -> None:
    data = gzip.compress(response("lies", lie=10**9) * (warc.MAX_REOPENED + 5))
    found = read(tmp_path, data, "a.warc.gz")
    assert {outcome(r) for r in found} == {"damaged"} and len(found) == warc.MAX_REOPENED + 1
    assert "the rest is lost" in found[-1].value.detail  # type: ignore[union-attr]


def test_bomb_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(files, "BOMB_RATIO", 100)
    data = gzip.compress(response("good")) + gzip.compress(frame(http(bytes(1 << 24))))
    found = read(tmp_path, data, "a.warc.gz", longest=1 << 22)
    assert [outcome(r) for r in found] == ["good", "damaged"]
    assert "100 times the file" in found[1].value.detail  # type: ignore[union-attr]


WORDS = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=20)
PARTS = st.one_of(
    WORDS.map(response),
    st.tuples(WORDS, st.integers(-60, 400)).map(lambda t: response(t[0], lie=t[1])),
    st.binary(max_size=60),
    st.sampled_from(
        [b"WARC/1.0\r\n", b"WARC/1.0\r\nContent-Length: 5\r\n\r\n", b"\r\n", frame(b"", "request")]
    ),
)


@given(st.lists(WORDS, max_size=8), st.integers(1, 3000))
@settings(max_examples=40)
def test_blocks_equal_the_iterator_of_fastwarc(words: list[str], block_bytes: int) -> None:
    data = b"".join(response(word) for word in words)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.warc")
        path.write_bytes(data)
        reader = FORMATS.get("warc")()
        parts = [
            r
            for b in reader.blocks(str(path), block_bytes)
            for r in reader.records(str(path), b.start, b.stop)
        ]
        whole = list(reader.records(str(path)))
    expected = [r.stream_pos for r in ArchiveIterator(io.BytesIO(data), record_types=WarcRecordType.response)]
    assert [r.offset for r in parts] == [r.offset for r in whole] == expected
    assert [outcome(r) for r in whole] == [outcome(r) for r in parts]


@given(st.lists(PARTS, max_size=8), st.integers(1, 2000))
def test_any_bytes_are_read_or_rejected(parts: list[bytes], block_bytes: int) -> None:
    """The last record is found, unless the length of an earlier one says that it is part of that one."""
    before = b"".join(parts) + b"\r\n"
    data = before + response("the last")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.warc")
        path.write_bytes(data)
        reader = FORMATS.get("warc")()
        whole = list(reader.records(str(path)))
        try:
            blocks = list(reader.blocks(str(path), block_bytes))
        except OSError:
            blocks = []
        divided = [outcome(r) for b in blocks for r in reader.records(str(path), b.start, b.stop)]
    swallowed = whole[-1].offset < len(before) < whole[-1].end
    assert swallowed or outcome(whole[-1]) in ("the last", "damaged")
    assert all(a.end <= b.offset for a, b in itertools.pairwise(whole))
    assert not blocks or divided == [outcome(r) for r in whole]
