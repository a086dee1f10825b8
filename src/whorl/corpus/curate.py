"""Curate: measure every document, find duplicates, select by a query, split the selection.

Output files are row-aligned with the documents, which are not modified:

- `attributes-00000.parquet`, ...: one file per `documents-*.parquet`, with the columns of `attribute_schema`.
- `selection.parquet`: over all document files in order, `split` ("train", "validation", "test" or "") and `reason` (why
  a document was dropped; "" if it was kept).
- `contamination.parquet`, with `decontaminate`: the documents that hold test items, and which.

Memory grows with the number of documents, not with their text: about 200 bytes per document for ids, hashes, clusters
and the split. Measures are units of work (`measures/run.py`). MinHash signatures (512 bytes per document) are in a memory
map.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus import duplicates
from whorl.corpus.attributes import attribute_file_name, attribute_schema, write_attributes
from whorl.corpus.config import CurateConfig
from whorl.corpus.decontamination import write_contamination
from whorl.corpus.mapreduce import LocalPool, UnitStore
from whorl.corpus.measures import MeasureConfig, filtered_query, measure_files
from whorl.corpus.splits import SPLITS, assign_splits
from whorl.errors import DOCS_URL, ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from whorl.tracking.progress import Progress


def curate(
    config: CurateConfig,
    documents: Sequence[Path],
    out: Path,
    progress: Progress,
    *,
    workers: int = 1,
    units: Path | None = None,
) -> dict[str, Any]:
    """Write the attributes and the selection of these document files into `out`.

    Args:
        workers: processes that measure; with more than one, a script must start under `if __name__ == "__main__"`.
        units: folder of finished measurements, which later runs reuse; default a temporary folder.

    Returns:
        `funnel` (read, the rest after each reason, train), `dropped` (reason -> documents, bytes), `splits` (name ->
        documents, bytes, largest_document_fraction), `clusters`, `near_duplicates`; with `decontaminate`, `contamination`
        (test set -> items, found, too_short, documents).

    Raises:
        ConfigError: a measure is unknown, or the query is invalid, or does not return `row` and `reason`.
        DataError: no document is selected, a test set is empty or cannot be read, or the corpus is too small to hold
            out a split.
    """
    import pyarrow.parquet as pq

    measures = [MeasureConfig(name="text", measure="text"), *config.measure_configs]
    columns = attribute_schema(measures).names
    n_rows = sum(pq.ParquetFile(path).metadata.num_rows for path in documents)
    with tempfile.TemporaryDirectory(dir=out, prefix="scratch-") as scratch:
        all_measures = [*measures, MeasureConfig(name="minhash", measure="minhash")]
        with progress.task("Measuring", total=n_rows * len(all_measures), unit="documents") as task:
            measured = measure_files(
                all_measures, documents, UnitStore(units or Path(scratch, "units")), LocalPool(workers),
                advance=task.advance,
            )  # fmt: skip
        table = _DocumentTable(documents, measured, n_rows, Path(scratch, "signatures"))
        with progress.task("Finding copies", total=None, unit="documents"):
            first = duplicates.first_occurrence(table.hashes)
            sets = duplicates.union_exact_duplicates(first)
            duplicates.cluster_near_duplicates(table.signatures, config.near_duplicate_similarity, sets)
            cluster = sets.roots()
        rows = np.arange(n_rows)
        of_corpus = {
            "exact_duplicate": first != rows,
            "cluster": cluster,
            "cluster_documents": np.bincount(cluster, minlength=n_rows)[cluster],
            "near_duplicate": cluster != rows,
        }
        write_attributes(documents, measures, measured, of_corpus, out)
    attributes = [out / attribute_file_name(path) for path in documents]
    reasons = _select(filtered_query(config.query, config.filters), attributes, columns, n_rows)
    contamination: dict[str, Any] = {}
    if config.decontaminate is not None:
        rows, contamination["contamination"] = write_contamination(
            config.decontaminate, documents, out, progress, units=units, executor=LocalPool(workers)
        )
        reasons[rows[reasons[rows] == ""]] = "contaminated"
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
    return {**_summary(table.n_bytes, reasons, split, cluster), **contamination}


class _DocumentTable:
    """Per-document data that stays in memory, and the memory map of all signatures."""

    def __init__(
        self, documents: Sequence[Path], measured: Mapping[str, Sequence[Path]], n: int, signature_file: Path
    ) -> None:
        self.ids: list[str] = []
        self.n_bytes = np.zeros(n, np.int64)
        self.hashes = np.zeros((n, 2), np.uint64)
        shape = (n, duplicates.N_HASHES)
        self.signatures = np.memmap(signature_file, np.uint32, mode="w+", shape=shape)
        begin = 0
        for path, text, minhash in zip(documents, measured["text"], measured["minhash"], strict=True):
            for ids, columns, signatures in zip(
                _row_groups(path, ["id"]), _row_groups(text, ["n_bytes", "exact_hash"]),
                _row_groups(minhash, ["signature"]), strict=True,
            ):  # fmt: skip
                end = begin + len(ids)
                self.ids += ids["id"].to_pylist()
                self.n_bytes[begin:end] = columns["n_bytes"].to_numpy()
                digests = b"".join(columns["exact_hash"].to_pylist())
                self.hashes[begin:end] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
                joined = b"".join(signatures["signature"].to_pylist())
                self.signatures[begin:end] = np.frombuffer(joined, np.uint32).reshape(-1, duplicates.N_HASHES)
                begin = end


def _row_groups(path: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def _select(query: str, attributes: Sequence[Path], columns: Sequence[str], n_rows: int) -> NDArray[Any]:
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
        raise ConfigError(
            f"curate's query fails: {str(error).splitlines()[0]}",
            expected=f"SQL that returns the columns row and reason, from the table attributes ({', '.join(columns)})",
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
        remove = duplicates.removable(
            [texts[int(row)][: duplicates.MAX_SIGNATURE_BYTES] for row in group], threshold
        )
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
