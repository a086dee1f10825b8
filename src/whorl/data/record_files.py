"""Records of a file or folder, in order, each with its position.

A path is a JSONL file (plain, .gz or .zst), a `.json` file with one array, a Parquet file, or a CSV or TSV file, whose
empty cells are missing fields. It may also be a folder saved by Hugging Face's `datasets` (one data set, or several named
splits), or a folder of such files, read in name order. The library `datasets` is not needed: it saves Arrow streams and a
small state file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from whorl.data.formats import format_name, open_format
from whorl.data.formats.format import LONGEST_RECORD
from whorl.data.formats.table import CSV
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.errors import DataError, one_of

JSON_ARRAYS = {".json": "jsonl"}
T = TypeVar("T")
# A record with its position, or the reason why it is bad.
FileRecord = tuple[Path, int, Mapping[str, Any] | BadRecordError]


def records(path: Path, *, split: str = "train", longest: int = LONGEST_RECORD) -> Iterator[FileRecord]:
    """Yield (file, line from 1, record or its error), in order.

    Raises:
        DataError: no such file or split, or an unknown suffix.
    """
    for file in _files(path, split):
        reader = open_format(str(file), JSON_ARRAYS, longest=longest)
        for record in reader.records(str(file)):
            value = record.value
            if isinstance(reader, CSV) and not isinstance(value, BadRecordError):
                value = {name: cell or None for name, cell in value.items()}
            yield file, record.number, value


def converted_records(
    path: Path, quarantine: Quarantine, split: str, shape: Callable[[Mapping[str, Any]], T], expected: str
) -> Iterator[T]:
    """Yield the records as `shape` converts them; bad ones go to the quarantine. The default id is file and line.

    Raises:
        DataError: no record is good, which `expected` describes: the path or the field names are probably wrong.
    """
    good = 0
    for file, line, record in records(path, split=split):
        try:
            if isinstance(record, BadRecordError):
                raise record
            name = record.get("id")
            record = {**record, "id": f"{file.name}:{line}" if name is None else name}
            record.setdefault("source", file.name)
            item = shape(record)
        except BadRecordError as error:
            quarantine.add(file, line, error)
        else:
            good += 1
            quarantine.accepted += 1
            yield item
    if not good:
        raise quarantine.no_records_error(path, expected)


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if not _readable(path):
            raise _unreadable(path)
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist", expected="a JSONL, Parquet or CSV file, or a folder of it")
    named = path / "dataset_dict.json"
    if named.is_file():
        splits = _json(named).get("splits", [])
        if split not in splits:
            raise DataError(f"{path} has no split {split!r}", expected=one_of(split, splits))
        path = path / split
    state = path / "state.json"
    if state.is_file():
        try:
            return [path / entry["filename"] for entry in _json(state)["_data_files"]]
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{state} has no list '_data_files' of files", do="save the data set again"
            ) from error
    files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix != ".arrow" and _readable(f))
    if not files:
        raise _unreadable(path)
    return files


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", expected="a JSON object") from error


def _readable(path: Path) -> bool:
    return format_name(str(path), JSON_ARRAYS) in ("jsonl", "parquet", "arrow", "csv", "tsv")


def _unreadable(path: Path) -> DataError:
    return DataError(
        f"{path} has no readable records",
        expected="*.jsonl, *.jsonl.gz, *.jsonl.zst, *.parquet, *.csv, *.tsv, or a folder saved by Hugging Face's datasets",
    )
