"""Readers of alignment data: files in, types of `formats` out; bad records go to the quarantine.

    preferences(path, quarantine)   -> an iterator of Preference; likewise conversations, pairs, unpaired, tasks

`path` is a JSONL file (plain, .gz or .zst), a `.json` file with one array, or a Parquet file. It may also be a folder
saved by Hugging Face's `datasets` (one data set, or several named splits), or a folder of such files, read in name
order. The library `datasets` is not needed: it saves Arrow streams and a small state file.

The subtle points. A line without an end must not fill memory, so lines are read up to a limit and the rest is
skipped. A truncated compressed file gives its complete records, then one quarantined record. A file without a single
good record
raises: the path or the field names are probably wrong.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from whorl.align.data import formats
from whorl.align.data.formats import Conversation, Preference, PromptCompletion, UnpairedPreference
from whorl.align.data.quarantine import BadRecordError, Quarantine
from whorl.errors import DataError, one_of
from whorl.evals.verify.task import VerifiableTask

LINES, COMPRESSED = (".jsonl", ".ndjson", ".json"), {".gz": "gzip", ".zst": "zstd"}
LONGEST_LINE = 32 << 20
BLOCK = 1 << 20
T = TypeVar("T")
# A record with its position, or the reason why it is bad.
Record = tuple[Path, int, Mapping[str, Any] | BadRecordError]


def conversations(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[Conversation]:
    """Yield conversations in order; `split` selects among several in a folder. Raises DataError: no record is good."""
    return _converted(path, quarantine, split, formats.to_conversation)


def pairs(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[PromptCompletion]:
    """Yield prompt-completion pairs; otherwise as `conversations`."""
    return _converted(path, quarantine, split, formats.to_prompt_completion)


def preferences(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[Preference]:
    """Yield preference pairs; otherwise as `conversations`."""
    return _converted(path, quarantine, split, formats.to_preference)


def unpaired(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[UnpairedPreference]:
    """Yield labelled completions; otherwise as `conversations`."""
    return _converted(path, quarantine, split, formats.to_unpaired_preference)


def tasks(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[VerifiableTask]:
    """Yield tasks; the default id is file and line. Otherwise as `conversations`."""
    return _converted(path, quarantine, split, formats.to_task)


def records(path: Path, *, split: str = "train", longest: int = LONGEST_LINE) -> Iterator[Record]:
    """Yield (file, line from 1, record or its error), in order.

    Raises:
        DataError: no such file or split, or an unknown suffix.
    """
    for file in _files(path, split):
        if file.suffix == ".parquet":
            yield from _columnar_records(file, _parquet)
        elif file.suffix == ".arrow":
            yield from _columnar_records(file, _arrow)
        else:
            yield from _json_lines(file, longest)


def _converted(
    path: Path, quarantine: Quarantine, split: str, shape: Callable[[Mapping[str, Any]], T]
) -> Iterator[T]:
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
        raise quarantine.no_records_error(path, "records in a format of align/data/formats.py")


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if not _readable(path):
            raise _unreadable(path)
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist", expected="a JSONL or Parquet file, or a folder of them")
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
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    return inner.suffix in LINES or path.suffix in (".parquet", ".arrow")


def _unreadable(path: Path) -> DataError:
    return DataError(
        f"{path} has no readable records",
        expected="*.jsonl, *.jsonl.gz, *.jsonl.zst, *.parquet, or a folder saved by Hugging Face's datasets",
    )


def _open(path: Path) -> BinaryIO:
    if path.suffix not in COMPRESSED or not path.stat().st_size:
        return path.open("rb")
    import pyarrow as pa

    # Unlike the gzip module, Arrow's stream bounds its buffer and reports a truncated file.
    raw: Any = pa.CompressedInputStream(pa.OSFile(str(path)), COMPRESSED[path.suffix])
    return io.BufferedReader(raw, 1 << 16)


def _json_lines(path: Path, longest: int) -> Iterator[Record]:
    number = 0
    try:
        with _open(path) as stream:
            if path.suffix == ".json" and stream.read(1) == b"[":  # one array, as Alpaca was published
                yield from _array(path, b"[" + stream.read())
                return
            if path.suffix == ".json":
                stream.seek(0)
            while line := stream.readline(longest):
                number += 1
                if len(line) == longest and not line.endswith(b"\n"):
                    while (block := stream.readline(BLOCK)) and not block.endswith(b"\n"):
                        pass
                    yield path, number, BadRecordError("too_large", "", f"a line of over {longest} bytes")
                elif not line.isspace():
                    yield path, number, _parsed(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    except OSError as error:
        yield path, number + 1, BadRecordError("damaged", "", str(error))


def _array(path: Path, data: bytes) -> Iterator[Record]:
    try:
        values = json.loads(data.decode())
    except ValueError as error:  # includes decoding errors
        yield path, 1, BadRecordError("bad_json", "", str(error))
        return
    for number, value in enumerate(values, 1):
        yield path, number, _object(value)


def _parsed(line: bytes) -> Mapping[str, Any] | BadRecordError:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecordError("bad_text", "", f"byte {error.start} of the line: {error.reason}")
    except (ValueError, RecursionError) as error:
        return BadRecordError("bad_json", "", str(error))
    return _object(value)


def _object(value: Any) -> Mapping[str, Any] | BadRecordError:
    if not isinstance(value, dict):
        return BadRecordError("bad_json", "", f"expected an object, found {type(value).__name__}")
    return value


def _columnar_records(path: Path, batches: Callable[[Path], Iterator[Any]]) -> Iterator[Record]:
    """Yield one record per row. Rows are decoded one by one, so that invalid bytes cost one row and not the batch."""
    import pyarrow as pa

    row = 0
    try:
        for batch in batches(path):
            for i in range(batch.num_rows):
                row += 1
                yield path, row, _row(batch, i)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        yield path, row + 1, BadRecordError("damaged", "", str(error)[:300])


def _row(batch: Any, i: int) -> Mapping[str, Any] | BadRecordError:
    try:
        return {name: batch.column(k)[i].as_py() for k, name in enumerate(batch.schema.names)}
    except UnicodeDecodeError as error:
        return BadRecordError("bad_text", "", f"byte {error.start} of a column: {error.reason}")


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        yield from table.iter_batches(batch_size=256)


def _arrow(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as stream, pa.ipc.open_stream(stream) as batches:
        yield from batches
