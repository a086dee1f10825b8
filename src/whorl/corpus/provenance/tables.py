"""Rows of a corpus's side files by number: documents, attributes, selection, duplicates.

All side files are row-aligned with the documents, so the row number joins them. Only the columns and row groups that a
question needs are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.corpus.reader import document_files
from whorl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

SELECTION_FILE = "selection.parquet"


class CorpusTables:
    """The files of an ingested and perhaps curated corpus.

    Args:
        documents: the folder that `ingest` wrote.
        selection: the folder that `curate` wrote for these documents; None before it.
    """

    def __init__(self, documents: Path, selection: Path | None = None) -> None:
        self.documents, self.selection = documents, selection
        self.document_files = document_files(documents)

    def columns(self, kind: str, names: Sequence[str]) -> pa.Table:
        """Return columns of all rows of "documents", "attributes", "selection" or "duplicates", in row order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        return pa.concat_tables([pq.read_table(path, columns=[*names]) for path in self._files(kind)])

    def names(self, kind: str) -> list[str]:
        """Return the columns that all files of a kind have."""
        import pyarrow.parquet as pq

        schemas = [pq.read_schema(path).names for path in self._files(kind)]
        return [name for name in schemas[0] if all(name in names for names in schemas)]

    def has(self, kind: str) -> bool:
        """Return whether there are files of a kind."""
        return bool(self._files(kind))

    def rows(self, kind: str, numbers: Iterable[int], names: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        """Return row number -> columns (`names`, or all) of some rows; reads their row groups only."""
        import pyarrow.parquet as pq

        wanted, found, begin = sorted(set(numbers)), dict[int, dict[str, Any]](), 0
        for path in self._files(kind):
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    end = begin + file.metadata.row_group(group).num_rows
                    inside = [row - begin for row in wanted if begin <= row < end]
                    if inside:
                        part = file.read_row_group(group, columns=[*names] or None).take(inside).to_pylist()
                        found |= {begin + row: values for row, values in zip(inside, part, strict=True)}
                    begin = end
        return found

    def _files(self, kind: str) -> list[Path]:
        if kind == "documents":
            return self.document_files
        if self.selection is None:
            return []
        if kind == "selection":
            return [path for path in [self.selection / SELECTION_FILE] if path.is_file()]
        return sorted(self.selection.glob(f"{kind}-*.parquet"))


def find_rows(tables: CorpusTables, reference: str) -> Mapping[int, dict[str, Any]]:
    """Return row -> id, source, path, offset of the documents that a reference names.

    Args:
        reference: an id or the start of one (4 digits at least), a path, or PATH:OFFSET. A path may lack its first folders.
    """
    import pyarrow.compute as pc

    table = tables.columns("documents", ["id", "source", "path", "offset"])
    is_id = len(reference) >= 4 and set(reference) <= set("0123456789abcdef")
    masks = [pc.starts_with(table["id"], reference)] if is_id else []
    path, colon, offset = reference.rpartition(":")
    if colon and offset.isdecimal():
        masks.append(pc.and_(_is_path(table, path), pc.equal(table["offset"], int(offset))))
    masks.append(_is_path(table, reference))
    for mask in masks:
        rows = [int(row) for row in pc.indices_nonzero(mask).to_pylist()]
        if rows:
            return dict(zip(rows, table.take(rows).to_pylist(), strict=True))
    return {}


def _is_path(table: pa.Table, path: str) -> Any:
    import pyarrow.compute as pc

    full = pc.binary_join_element_wise(table["source"], table["path"], "/")
    below = pc.ends_with(full, "/" + path.lstrip("/"))
    return pc.or_(pc.equal(table["path"], path), pc.or_(below, pc.equal(full, path)))


def one_row(tables: CorpusTables, reference: str) -> tuple[int, dict[str, Any]]:
    """Return the one document that a reference names. Raises DataError: none, or several."""
    found = find_rows(tables, reference)
    if not found:
        raise DataError(
            f"no document {reference!r} in {tables.documents}",
            expected="an id, the start of one, a path, or PATH:OFFSET",
            do="`whorl corpus show` prints ids of documents of each rule",
        )
    if len(found) > 1:
        first = ", ".join(f"{d['id'][:12]} ({d['path']}:{d['offset']})" for d in [*found.values()][:5])
        raise DataError(
            f"{reference!r} names {len(found)} documents: {first}{' ...' if len(found) > 5 else ''}",
            expected="a whole id, or PATH:OFFSET",
        )
    return next(iter(found.items()))
