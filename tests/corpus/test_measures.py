"""Measures: columns of document files as units of work, and their use in the selection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from whorl.corpus import CurateConfig, curate
from whorl.corpus.documents import document_schema
from whorl.corpus.mapreduce import LocalPool, UnitStore
from whorl.corpus.measures.measure import Columns, Measure, MeasureConfig, Texts
from whorl.corpus.measures.run import measure_files
from whorl.errors import ConfigError, DataError
from whorl.tracking.progress import Progress

measured: list[str] = []  # texts that `count_words` has read


def count_words(batch: Texts) -> Columns:
    measured.extend(batch.texts)
    return {"words": [len(text.split()) for text in batch.texts]}


def count_listed(model: str) -> Callable[[Texts], Columns]:
    words = Path(model).read_text().split()
    return lambda batch: {"count": [sum(t.split().count(w) for w in words) for t in batch.texts]}


WORDS = Measure("words", 1, "none", {"words": "int64"}, lambda: count_words)
LISTED = Measure("listed", 1, "none", {"count": "int64"}, count_listed, needs_model=True)
SHORT = Measure(
    "short", 1, "none", {"words": "int64"}, lambda: lambda batch: {"words": [1] * (len(batch) - 1)}
)
HERE = __name__


def write_documents(path: Path, texts: list[str]) -> Path:
    rows = [
        {"id": f"{path.name}{i}", "source": "s", "path": f"{i}.txt", "offset": 0, "length": len(t), "text": t}
        for i, t in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=document_schema()), path, row_group_size=3)
    return path


def numbered(n: int, start: int = 0) -> list[str]:
    return [f"text {i} " + "word " * (30 + i) for i in range(start, start + n)]


def test_new_measure_reads_text_once_and_changed_file_alone(tmp_path: Path) -> None:
    files = [write_documents(tmp_path / f"documents-0000{k}.parquet", numbered(7, 10 * k)) for k in range(2)]
    config = [MeasureConfig(name="words", measure=f"{HERE}:WORDS")]
    units = UnitStore(tmp_path / "units")
    measured.clear()
    found = measure_files(config, files, units, LocalPool())
    assert sorted(measured) == sorted(numbered(7) + numbered(7, 10))
    values = [pq.read_table(p)["words"].to_pylist() for p in found["words"]]
    assert values == [[len(t.split()) for t in numbered(7, 10 * k)] for k in range(2)]
    groups = [[pq.ParquetFile(p).metadata.row_group(g).num_rows for g in range(3)] for p in found["words"]]
    assert groups == [[3, 3, 1]] * 2

    measured.clear()
    assert measure_files(config, files, units, LocalPool()) == found and not measured
    write_documents(files[1], ["changed", *numbered(2)])
    again = measure_files(config, files, units, LocalPool())
    assert again["words"][0] == found["words"][0] and measured == ["changed", *numbered(2)]


def test_model_content_is_part_of_the_key(tmp_path: Path) -> None:
    files = [write_documents(tmp_path / "documents-00000.parquet", ["a b b", "b c"])]
    model = tmp_path / "list"
    config = [MeasureConfig(name="own", measure=f"{HERE}:LISTED", model=model)]
    for words, expected in (("a", [1, 0]), ("b", [2, 1]), ("a", [1, 0])):
        model.write_text(words)
        (path,) = measure_files(config, files, UnitStore(tmp_path / "units"), LocalPool())["own"]
        assert pq.read_table(path)["count"].to_pylist() == expected


def test_curate_selects_by_the_columns_of_measures(tmp_path: Path) -> None:
    files = [write_documents(tmp_path / "documents-00000.parquet", numbered(40))]
    (tmp_path / "list").write_text("word")
    options: dict[str, Any] = {
        "measures": [
            f"{HERE}:WORDS",
            {"name": "own", "measure": f"{HERE}:LISTED", "model": tmp_path / "list"},
        ],
        "max_held_out_fraction": 0.2,
    }
    cases = "CASE WHEN words < {} THEN 'few' WHEN own_count > 60 THEN 'many' ELSE '' END"
    query = f"SELECT row, {cases} AS reason FROM attributes"
    for limit, fewer in ((42, 10), (52, 20)):
        out = tmp_path / f"curated{limit}"
        out.mkdir()
        measured.clear()
        config = CurateConfig(query=query.format(limit), **options)
        found = curate(config, files, out, Progress.silent(), units=tmp_path / "units")
        assert {k: n["documents"] for k, n in found["dropped"].items()} == {"few": fewer, "many": 9}
        assert len(measured) == (40 if limit == 42 else 0)  # another threshold reads no text
    columns = pq.read_table(out / "attributes-00000.parquet").to_pydict()
    assert columns["words"] == [len(t.split()) for t in numbered(40)] and columns["row"] == list(range(40))


def test_workers_give_equal_bytes(tmp_path: Path) -> None:
    files = [write_documents(tmp_path / f"documents-0000{k}.parquet", numbered(7, 10 * k)) for k in range(4)]
    config = [MeasureConfig(name=name, measure=name) for name in ("text", "language")]
    one, two = (
        measure_files(config, files, UnitStore(tmp_path / f"units{n}"), LocalPool(n, isolate=True))
        for n in (1, 2)
    )
    for name in one:
        assert [p.read_bytes() for p in one[name]] == [p.read_bytes() for p in two[name]]
        assert [p.parent.name for p in one[name]] == [p.parent.name for p in two[name]]


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        (["text"], "two measures have the name 'text'"),
        ([f"{HERE}:WORDS", {"name": "other", "measure": f"{HERE}:WORDS"}], "both have the column 'words'"),
        ([f"{HERE}:LISTED"], "needs a model"),
        ([{"name": "own", "measure": f"{HERE}:LISTED", "model": "absent"}], "absent cannot be read"),
        ([f"{HERE}:numbered"], "is no measure"),
        ([{"name": "path", "measure": f"{HERE}:PATH_COLUMN"}], "both have the column 'path'"),
    ],
)
def test_wrong_measures_are_refused(tmp_path: Path, measures: list[Any], message: str) -> None:
    files = [write_documents(tmp_path / "documents-00000.parquet", numbered(5))]
    with pytest.raises(ConfigError, match=message):
        curate(CurateConfig(measures=measures), files, tmp_path, Progress.silent())


PATH_COLUMN = Measure("path", 1, "none", {"path": "string"}, lambda: count_words)


def test_measure_of_wrong_length_or_unknown_name(tmp_path: Path) -> None:
    files = [write_documents(tmp_path / "documents-00000.parquet", numbered(5))]
    config = [MeasureConfig(name="short", measure=f"{HERE}:SHORT")]
    with pytest.raises(DataError, match=r"SHORT returned .* for 3 texts"):
        measure_files(config, files, UnitStore(tmp_path / "units"), LocalPool())
    with pytest.raises(ValidationError, match="did you mean"):
        CurateConfig(measures=["txt"])
