"""Parquet, in blocks of row groups, and Arrow streams: one record per row. Offsets are rows, from 0.

Rows are decoded in small batches, since each text may reach the limit. If a batch has invalid bytes, its rows are decoded
one by one, so that they cost one row. Rows that are many times larger than the file (`files.bomb_limit`) are damage: a
dictionary or compression makes 1.6 GB of 1.2 MB.

A struct holds every field that any row has. A null inside of a column stands for a field that the row does not have, and the
key is left out, as in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whorl.data.files import bomb_error, bomb_limit, file_size, is_url, open_file
from whorl.data.formats.format import Block, Format, Record
from whorl.data.quarantine import BadRecordError

BATCH_ROWS = 16


class _Columnar(Format):
    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read. Raises BadRecordError: the first field is not among them."""
        if self.fields and self.fields[0] not in names:
            detail = f"no column {self.fields[0]!r} among {', '.join(names[:10])[:200]}"
            raise BadRecordError("no_text_field", self.fields[0], detail)
        return [name for name in self.fields if name in names] if self.fields else names

    def rows(self, batches: Iterator[Any], first: int, limit: int) -> Iterator[Record]:
        number = n_decoded = n_text = 0
        for batch in batches:
            n_decoded += batch.nbytes
            if (
                max(n_decoded, n_text) > limit
            ):  # bytes of an array of the dictionary type are those of its indices
                raise bomb_error(limit)
            for value in _values(batch):
                number += 1
                text = None if isinstance(value, BadRecordError) else value.get(self.text_field)
                length = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
                n_text += length
                yield Record(number, first + number - 1, length, value, first + number)


class Parquet(_Columnar):
    """See the top of this file."""

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        """Yield one block per row group. Raises ValueError: the first field is no column."""
        with _open(uri) as table:
            try:
                self.columns(table.schema_arrow.names)
            except BadRecordError as error:
                raise ValueError(error.detail) from error
            for group in range(table.num_row_groups):
                yield Block(group, group + 1, table.metadata.row_group(group).total_byte_size)

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        size = file_size(uri)
        with _open(uri) as table:
            try:
                columns = self.columns(table.schema_arrow.names)
            except BadRecordError as error:
                yield Record(1, 0, 0, error, 0)
                return
            n_groups = table.num_row_groups
            groups = range(start, n_groups if stop is None else min(stop, n_groups))
            first = sum(table.metadata.row_group(group).num_rows for group in range(start))
            sizes = [_compressed_size(table.metadata.row_group(group)) for group in range(n_groups)]
            if sum(sizes) > size:
                raise ValueError(f"its row groups have {sum(sizes):,} bytes, and the file {size:,}")
            limit = bomb_limit(sum(sizes[group] for group in groups), len(groups) / max(n_groups, 1))
            batches = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
            yield from self.rows(batches, first, limit)


class Arrow(_Columnar):
    """An Arrow stream, as `datasets` saves it."""

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        import pyarrow as pa

        limit = bomb_limit(file_size(uri))
        with (
            open_file(uri) if is_url(uri) else pa.memory_map(uri) as stream,
            pa.ipc.open_stream(stream) as batches,
        ):
            small = (b.slice(i, BATCH_ROWS) for b in batches for i in range(0, b.num_rows, BATCH_ROWS))
            yield from self.rows(small, 0, limit)


def _open(uri: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(open_file(uri) if is_url(uri) else uri)


def _compressed_size(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


def _values(batch: Any) -> Iterator[dict[str, Any] | BadRecordError]:
    import pyarrow as pa

    nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
    try:
        for row in batch.to_pylist():  # decodes all before the first
            yield {**row, **{name: _without_nulls(row[name]) for name in nested}}
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                row = {name: batch.column(k)[i].as_py() for k, name in enumerate(batch.schema.names)}
                yield {**row, **{name: _without_nulls(row[name]) for name in nested}}
            except UnicodeDecodeError as error:
                yield BadRecordError("invalid_utf8", "", f"byte {error.start}: {error.reason}")


def _without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
