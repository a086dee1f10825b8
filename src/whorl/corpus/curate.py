"""Curate: measure every document, find duplicates, select by a query, split the selection.

Output files are row-aligned with the documents, which are not modified:

- `attributes-00000.parquet`, ...: one file per `documents-*.parquet`, with the columns of `attribute_schema`.
- `selection.parquet`: over all document files in order, `split` ("train", "validation", "test" or "") and `reason` (why
  a document was dropped; "" if it was kept).

Memory grows with the number of documents, not with their text: about 200 bytes per document for ids, hashes, clusters
and the split. Attributes are written while documents are read. MinHash signatures (512 bytes per document) are in a
memory map.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus import duplicates
from whorl.corpus.attributes import PROSE_LANGUAGES, attribute_schema, text_attributes
from whorl.corpus.config import CurateConfig
from whorl.corpus.splits import SPLITS, assign_splits
from whorl.errors import DOCS_URL, ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from whorl.tracking.progress import Progress

BLOCK_BYTES = 2_000_000
# Only the beginning of a longer document is compared: hashing a block needs about 60 bytes per byte of text.
MAX_SIGNATURE_BYTES = 2_000_000


def curate(config: CurateConfig, documents: Sequence[Path], out: Path, progress: Progress) -> dict[str, Any]:
    """Write the attributes and the selection of these document files into `out`.

    Returns:
        `funnel` (read, the rest after each reason, train), `dropped` (reason -> documents, bytes), `splits` (name ->
        documents, bytes, largest_document_fraction), `clusters`, `near_duplicates`.

    Raises:
        ConfigError: the query is invalid, or does not return `row` and `reason`.
        DataError: no document is selected, or the corpus is too small to hold out a split.
    """
    import pyarrow.parquet as pq

    n_rows = sum(pq.ParquetFile(path).metadata.num_rows for path in documents)
    with tempfile.TemporaryDirectory(dir=out, prefix="scratch-") as scratch:
        table = _measure_all(documents, n_rows, Path(scratch), progress)
        with progress.task("Finding copies", total=None, unit="documents"):
            first = duplicates.first_occurrence(table.hashes)
            sets = duplicates.union_exact_duplicates(first)
            duplicates.cluster_near_duplicates(table.signatures, config.near_duplicate_similarity, sets)
            cluster = sets.roots()
        _write_attributes(documents, Path(scratch), out, first, cluster)
    attributes = [out / _attribute_file_name(path) for path in documents]
    reasons = _select(config.query, attributes, n_rows)
    if config.near_duplicates == "remove":
        _remove_near_duplicates(documents, cluster, reasons, config.near_duplicate_similarity)
    kept = reasons == ""
    if not kept.any():
        names, counts = np.unique(reasons, return_counts=True)
        reason_counts = ", ".join(f"{name} {n}" for name, n in zip(names, counts, strict=True))
        raise DataError(
            f"the selection keeps none of {n_rows} documents: {reason_counts}",
            expected="at least one document with an empty reason",
            do="loosen the thresholds in curate's query",
        )
    split = assign_splits(table.ids, cluster, table.n_bytes, kept, config)
    _write_selection(out, split, reasons)
    return _summary(table.n_bytes, reasons, split, cluster)


class _DocumentTable:
    """Per-document data that stays in memory, and the memory map of all signatures."""

    def __init__(self, n: int, signature_file: Path) -> None:
        self.ids: list[str] = []
        self.n_bytes = np.zeros(n, np.int64)
        self.hashes = np.zeros((n, 2), np.uint64)
        shape = (n, duplicates.N_HASHES)
        self.signatures = np.memmap(signature_file, np.uint32, mode="w+", shape=shape)


def _row_batches(file: Any, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of an open Parquet file in batches of at most BLOCK_BYTES of text or one document."""
    for group in range(file.num_row_groups):
        rows: list[dict[str, Any]] = []
        size = 0
        for row in file.read_row_group(group, columns=columns).to_pylist():
            if rows and size + len(row["text"]) > BLOCK_BYTES:
                yield rows
                rows, size = [], 0
            rows.append(row)
            size += len(row["text"])
        yield rows


def _measure_all(documents: Sequence[Path], n_rows: int, scratch: Path, progress: Progress) -> _DocumentTable:
    """Read all text once: write attributes to scratch files and return the rest as a `_DocumentTable`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _DocumentTable(n_rows, scratch / "signatures")
    schema = attribute_schema()
    schema = pa.schema([schema.field(i) for i in range(schema.get_field_index("exact_hash") + 1)])
    provenance = ["source", "path", "language", "licence"]
    with progress.task("Measuring", total=n_rows, unit="documents") as task:
        for path in documents:
            with (
                pq.ParquetFile(path) as file,
                pq.ParquetWriter(scratch / _attribute_file_name(path), schema) as writer,
            ):
                for rows in _row_batches(file, ["id", "text", *provenance]):
                    begin = len(table.ids)
                    end = begin + len(rows)
                    texts = [row["text"].encode() for row in rows]
                    measured = [
                        {
                            "row": begin + i,
                            **{k: row[k] for k in provenance},
                            "is_code": row["language"] not in PROSE_LANGUAGES,
                            **text_attributes(text, len(row["text"])),
                        }
                        for i, (row, text) in enumerate(zip(rows, texts, strict=True))
                    ]
                    table.ids += [row["id"] for row in rows]
                    table.n_bytes[begin:end] = [len(text) for text in texts]
                    digests = b"".join(row["exact_hash"] for row in measured)
                    table.hashes[begin:end] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
                    table.signatures[begin:end] = duplicates.minhash_signatures(
                        [t[:MAX_SIGNATURE_BYTES] for t in texts]
                    )
                    writer.write_table(pa.Table.from_pylist(measured, schema=schema))
                    task.advance(len(rows))
    return table


def _attribute_file_name(documents: Path) -> str:
    return documents.name.replace("documents", "attributes", 1)


def _write_attributes(
    documents: Sequence[Path], scratch: Path, out: Path, first: NDArray[np.int64], cluster: NDArray[np.int64]
) -> None:
    """Add the columns that need all documents, one row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    members = np.bincount(cluster, minlength=len(cluster))
    rows = np.arange(len(cluster))
    late = {
        "exact_duplicate": first != rows,
        "cluster": cluster,
        "cluster_documents": members[cluster],
        "near_duplicate": cluster != rows,
    }
    begin = 0
    for path in documents:
        name = _attribute_file_name(path)
        with (
            pq.ParquetFile(scratch / name) as measured,
            pq.ParquetWriter(out / name, attribute_schema(), compression="zstd") as writer,
        ):
            for group in range(measured.num_row_groups):
                part = measured.read_row_group(group)
                for column, values in late.items():
                    part = part.append_column(column, pa.array(values[begin : begin + len(part)]))
                writer.write_table(part.cast(attribute_schema()))
                begin += len(part)


def _select(query: str, attributes: Sequence[Path], n_rows: int) -> NDArray[Any]:
    """Run the query and return a reason per row: "" if kept, 'not_selected' if the query returns no row for it."""
    import duckdb
    import pyarrow.dataset as ds

    # A recipe's SQL may come from an untrusted source, so it can read only the attributes. A registered data set is
    # streamed from its files, so memory does not grow with the number of rows.
    database = duckdb.connect(
        config={
            "threads": 1,
            "memory_limit": "256MB",
            "enable_external_access": False,
            "lock_configuration": True,
        }
    )
    try:
        database.register("attributes", ds.dataset([str(path) for path in attributes]))
        typed = "coalesce(row::BIGINT, -1) AS row, coalesce(reason::VARCHAR, '') AS reason"
        result = database.execute(f"SELECT {typed} FROM ({query})").fetchnumpy()
    except duckdb.Error as error:
        columns = ", ".join(attribute_schema().names)
        raise ConfigError(
            f"curate's query fails: {str(error).splitlines()[0]}",
            expected=f"SQL that returns the columns row and reason, from the table attributes ({columns})",
            do=f"start from the default query in {DOCS_URL}/corpus.md",
        ) from error
    finally:
        database.close()
    rows = result["row"]
    if len(np.unique(rows)) != len(rows) or (len(rows) and not 0 <= rows.min() <= rows.max() < n_rows):
        raise ConfigError(
            "curate's query returns unknown rows, or a row more than once",
            expected=f"each row from 0 to {n_rows - 1} at most once",
            do="pass the column row through unchanged; GROUP BY row after a join",
        )
    out = np.full(n_rows, "not_selected", dtype=object)
    out[rows] = result["reason"]
    return out


def _remove_near_duplicates(
    documents: Sequence[Path], cluster: NDArray[np.int64], reasons: NDArray[Any], threshold: float
) -> None:
    """Set the reason of verified copies among the selected documents of each cluster; the first stays."""
    rows = np.flatnonzero(reasons == "")
    rows = rows[np.bincount(cluster[rows], minlength=len(cluster))[cluster[rows]] > 1]
    rows = rows[np.argsort(cluster[rows], kind="stable")]
    texts = _texts_of(documents, set(rows.tolist()))
    for group in np.split(rows, np.flatnonzero(np.diff(cluster[rows])) + 1):
        remove = duplicates.removable([texts[int(row)][:MAX_SIGNATURE_BYTES] for row in group], threshold)
        reasons[group[remove]] = "near_duplicate"


def _texts_of(documents: Sequence[Path], rows: set[int]) -> dict[int, bytes]:
    """Return the texts of these rows; they are held in memory."""
    import pyarrow.parquet as pq

    texts: dict[int, bytes] = {}
    begin = 0
    for path in documents:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                n = file.metadata.row_group(group).num_rows
                wanted = [i for i in range(n) if begin + i in rows]
                if wanted:
                    column = file.read_row_group(group, columns=["text"])["text"]
                    texts |= {begin + i: column[i].as_py().encode() for i in wanted}
                begin += n
    return texts


def _write_selection(out: Path, split: NDArray[Any], reasons: NDArray[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table({"split": pa.array(split.tolist()), "reason": pa.array(reasons.tolist())})
    pq.write_table(table, out / "selection.parquet", compression="zstd")


def _summary(
    n_bytes: NDArray[np.int64], reasons: NDArray[Any], split: NDArray[Any], cluster: NDArray[np.int64]
) -> dict[str, Any]:
    def count(mask: NDArray[np.bool_]) -> dict[str, int]:
        return {"documents": int(mask.sum()), "bytes": int(n_bytes[mask].sum())}

    remaining = np.ones(len(n_bytes), bool)
    funnel: list[dict[str, Any]] = [{"stage": "read", **count(remaining)}]
    dropped = {reason: count(reasons == reason) for reason in sorted(set(reasons.tolist()) - {""})}
    for reason in sorted(dropped, key=lambda r: -dropped[r]["bytes"]):
        remaining = remaining & (reasons != reason)
        funnel.append({"stage": f"without {reason}", **count(remaining)})
    splits: dict[str, dict[str, Any]] = {}
    for name in SPLITS:
        mask = split == name
        largest = int(n_bytes[mask].max(initial=0))
        splits[name] = {
            **count(mask),
            "largest_document_fraction": largest / max(int(n_bytes[mask].sum()), 1),
        }
    funnel.append({"stage": "train", **count(split == "train")})
    return {
        "funnel": funnel,
        "dropped": dropped,
        "splits": splits,
        "clusters": len(np.unique(cluster)),
        "near_duplicates": int((cluster != np.arange(len(cluster))).sum()),
    }
