"""Write the removed duplicates into `duplicates-*.parquet`.

`duplicates-00000.parquet`, ... are one file per document file. They have a line for each removed document:

- `row`, over all document files; `kind`, "near_duplicate" or "semantic_duplicate";
- `matched_id`, of the document that stays; `corpus`, the name of the earlier corpus that has it, else "";
- `similarity`, exact Jaccard similarity or cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.near.stages import NearDuplicates

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
