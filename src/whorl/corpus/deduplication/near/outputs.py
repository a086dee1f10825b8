"""Write the removed duplicates into `duplicates-*.parquet`, and on request the documents that stay.

`duplicates-00000.parquet`, ... are one file per document file. They have a line for each removed document:

- `row`, over all document files; `kind`, "near_duplicate" or "semantic_duplicate";
- `matched_id`, of the document that stays; `corpus`, the name of the earlier corpus that has it, else "";
- `similarity`, exact Jaccard similarity or cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.near.arrays import read_arrays, write_arrays
from whorl.corpus.deduplication.near.stages import NearDuplicates
from whorl.corpus.mapreduce import Executor, Input, Stage, Unit, UnitStore
from whorl.corpus.mapreduce.units import link_or_copy

KIND = "near_duplicate"


def write_duplicates(
    found: NearDuplicates, documents: Sequence[Path], out: Path, *, earlier: Sequence[Path] = (),
    names: Sequence[str] = (),
) -> NDArray[np.int64]:  # fmt: skip
    """Write `duplicates-*.parquet` into `out`; return the removed rows over all files of `documents`.

    Args:
        found: of `find_near_duplicates` with the same `documents` and `earlier`.
        names: of the corpus of each file of `earlier`; default their folders.
    """
    return write_removed(KIND, found, documents, out, earlier=earlier, names=names)


class Removed(Protocol):
    """Removed documents, those that stay for them, and their similarity: [n] each. Numbers are file << 32 | row."""

    @property
    def removed(self) -> NDArray[np.int64]: ...
    @property
    def matched(self) -> NDArray[np.int64]: ...
    @property
    def similarity(self) -> NDArray[np.float64]: ...


def write_removed(
    kind: str, found: Removed, documents: Sequence[Path], out: Path, *, earlier: Sequence[Path] = (),
    names: Sequence[str] = (),
) -> NDArray[np.int64]:  # fmt: skip
    """Add removed documents of one kind to `duplicates-*.parquet`; see `write_duplicates`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = np.cumsum([0, *(pq.read_metadata(path).num_rows for path in documents)], dtype=np.int64)
    file = (found.removed >> 32) - len(earlier)
    rows = first[file] + (found.removed & 0xFFFFFFFF)
    ids = _ids(found.matched, [*earlier, *documents])
    corpora = [*(names or [path.parent.name for path in earlier]), *[""] * len(documents)]
    for number, path in enumerate(documents):
        some = np.flatnonzero(file == number)
        table: Any = pa.table({
            "row": pa.array(rows[some], pa.int64()),
            "kind": pa.array([kind] * len(some), pa.string()),
            "matched_id": pa.array([ids[i] for i in some.tolist()], pa.string()),
            "corpus": pa.array([corpora[i] for i in (found.matched[some] >> 32).tolist()], pa.string()),
            "similarity": pa.array(found.similarity[some], pa.float64()),
        })  # fmt: skip
        target = out / path.name.replace("documents", "duplicates", 1)
        if target.exists():
            table = pa.concat_tables([pq.read_table(target), table]).sort_by("row")
        pq.write_table(table, target, compression="zstd")
    numbers: NDArray[np.int64] = rows
    return numbers


def _ids(wanted: NDArray[np.int64], files: Sequence[Path]) -> list[str]:
    """Return the ids of documents, numbers of files << 32 | rows."""
    import pyarrow.parquet as pq

    out: NDArray[Any] = np.empty(len(wanted), dtype=object)
    for number in np.unique(wanted >> 32).tolist():
        some = np.flatnonzero(wanted >> 32 == number)
        column = pq.read_table(files[number], columns=["id"])["id"].take(wanted[some] & 0xFFFFFFFF)
        out[some] = column.to_pylist()
    return [str(found) for found in out]


def rewrite_documents(
    found: NearDuplicates, documents: Sequence[Path], out: Path, store: UnitStore, executor: Executor, *,
    n_earlier: int = 0,
) -> list[Path]:  # fmt: skip
    """Write the documents that stay into files of the same names in `out`; return them.

    Args:
        n_earlier: number of files of earlier corpora, which `found` counts first.
    """

    units, written = [], []
    removed = out / ".removed"
    removed.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(documents):
        some = found.removed[found.removed >> 32 == number + n_earlier] & 0xFFFFFFFF
        write_arrays(removed / path.name, some)
        units.append(Unit((Input.of(path), Input.of(removed / path.name))))
    for path, output in zip(
        documents, store.run(Stage(f"{__name__}:keep_rows", 1), units, executor), strict=True
    ):
        (out / path.name).unlink(missing_ok=True)
        link_or_copy(output.folder / "documents", out / path.name)
        (removed / path.name).unlink()
        written.append(out / path.name)
    removed.rmdir()
    return written


def keep_rows(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: write a document file without the removed rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    removed, begin, kept = read_arrays(inputs[1])[0], 0, 0
    with pq.ParquetFile(inputs[0]) as file:
        schema = file.schema_arrow
        plain = [name for name in schema.names if name not in ("id", "path", "text")]
        with pq.ParquetWriter(out / "documents", schema, compression="zstd", use_dictionary=plain) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                mask = np.ones(len(table), bool)
                mask[removed[(removed >= begin) & (removed < begin + len(table))] - begin] = False
                begin += len(table)
                kept += int(mask.sum())
                bits = pa.py_buffer(np.packbits(mask, bitorder="little"))  # `pa.array` would import pandas
                some = pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])
                writer.write_table(table if mask.all() else table.filter(some))
    return {"documents": kept}
