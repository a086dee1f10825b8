"""Tables: what the csv module wrote is read, in any delimiter and encoding; bad rows cost no other row."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.align.data.read import conversations, unpaired
from whorl.data.formats import FORMATS, open_format
from whorl.data.quarantine import BadRecordError, Quarantine

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
TABLES = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), max_size=8))


def read(path: Path) -> list[tuple[int, Any]]:
    """Number, and fields or reason of each record."""
    found = open_format(str(path)).records(str(path))
    return [
        (r.number, r.value.reason if isinstance(r.value, BadRecordError) else dict(r.value)) for r in found
    ]


def written(names: list[str], rows: list[list[str]], delimiter: str, end: str) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
        [names, *rows]
    )
    return stream.getvalue()


@settings(max_examples=150)
@given(
    TABLES, st.sampled_from([",", ";", "|", "\t"]), st.sampled_from(["\n", "\r\n"]), st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)  # fmt: skip
def test_written_tables_are_read(
    rows: list[list[str]], delimiter: str, end: str, is_packed: bool, encoding: str
) -> None:
    names = [f"n{i}" for i in range(len(rows[0]) if rows else 1)]
    data = written(names, rows, delimiter, end).encode(encoding)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{'tsv' if delimiter == chr(9) else 'csv'}{'.gz' * is_packed}")
        path.write_bytes(gzip.compress(data) if is_packed else data)
        found = list(open_format(str(path)).records(str(path)))
    expected = [dict(zip(names, row, strict=True)) for row in rows]
    assert [r.value for r in found] == expected
    assert [r.number for r in found] == list(range(2, len(rows) + 2))
    for a, b in itertools.pairwise(found):
        assert a.end == b.offset == a.offset + a.length
    if found:
        assert found[-1].end == len(data)


@given(st.binary(max_size=120) | st.text('a",;\n\r\té', max_size=60).map(str.encode))
def test_any_bytes_are_rows_or_rejected(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_bytes(data)
        records = list(FORMATS.get("csv")(longest=40).records(str(path)))
    assert all(a.end <= b.offset for a, b in itertools.pairwise(records))
    assert not records or records[-1].end <= len(data)


def test_ragged_rows_and_open_quotes_are_rejected_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3\n\n4,5,6\n"x" y,7\n"1\n1",2\n8,9\n"open,10\n')
    found = list(open_format(str(path)).records(str(path)))
    reasons = [(r.number, getattr(r.value, "reason", r.value)) for r in found]
    assert reasons == [
        (2, {"a": "1", "b": "2"}), (3, "ragged"), (5, "ragged"), (6, "bad_quotes"), (7, {"a": "1\n1", "b": "2"}),
        (8, {"a": "8", "b": "9"}), (9, "bad_quotes"),
    ]  # fmt: skip
    assert "1 fields, the first row has 2" in str(found[1].value)
    assert "3 fields" in str(found[2].value)


def test_row_over_the_limit_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text\none\n{"x" * 500}\ntwo\n"{"y" * 200_000}"\nthree\n"{"z" * 9}\n' + "four\n" * 30)
    records = list(FORMATS.get("csv")(longest=100).records(str(path)))
    found = [r.value.reason if isinstance(r.value, BadRecordError) else r.value["text"] for r in records]
    assert found == ["one", "too_large", "two", "too_large", "three", "too_large", *["four"] * 12]
    path.write_text(f"text\n{'x' * 300_000}\n")  # beyond the default of the csv module
    assert len(read(path)[0][1]["text"]) == 300_000


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Größe, naïve café – über alles, déjà vu"), ("gb18030", "今天天气很好,我们去公园散步,然后回家吃饭。"),
        ("shift_jis", "今日は天気がいいので、公園を散歩しました。表示"),
        ("cp1251", "Привет, как дела? Сегодня хорошая погода"),
    ],
)  # fmt: skip
def test_encoding_is_detected(encoding: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        written(["text", "n"], [[text, str(n)] for n in range(40)], ";", "\r\n").encode(encoding)
    )
    assert {row["text"] for _, row in read(path)} == {text}


def test_row_of_another_encoding_is_decoded_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text\nüber\n".encode() + "Grüße\n".encode("cp1252") + "naïve\n".encode())
    found = [row["text"] for _, row in read(path)]
    assert (found[0], found[2]) == ("über", "naïve") and len(found) == 3


def test_table_of_one_column_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nHello, world\n"quoted, too"\n')
    assert read(path) == [(2, {"text": "Hello, world"}), (3, {"text": "quoted, too"})]


def test_twice_the_same_name_and_binary_end_the_table(tmp_path: Path) -> None:
    for content, reason in ((b"a,a\n1,2\n", "no_header"), (b"a\0b\n", "binary"), (b"", None)):
        (tmp_path / "a.csv").write_bytes(content)
        assert [r for _, r in read(tmp_path / "a.csv")] == ([reason] if reason else [])


def test_tables_of_conversations_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "talks.csv"
    talk = '"[{""role"": ""user"", ""content"": ""hi""}, {""role"": ""assistant"", ""content"": ""ho""}]"'
    path.write_text(f"messages,instruction,output\n{talk},,\n,say hi,hi\n,,\nx,,\na,b\n")
    quarantine = Quarantine()
    found = list(conversations(path, quarantine))
    assert [c.messages[0]["content"] for c in found] == ["hi", "say hi"] and found[1].id == "talks.csv:3"
    assert [(r.line, r.reason, r.field) for r in quarantine] == [
        (4, "unknown_shape", ""), (5, "bad_field", "messages"), (6, "ragged", ""),
    ]  # fmt: skip
    (tmp_path / "kto.tsv").write_text("prompt\tcompletion\tlabel\np\tc\tTRUE\np\td\t0\np\te\tno\n")
    assert [u.label for u in unpaired(tmp_path / "kto.tsv", quarantine)] == [True, False]
