"""Curate: measure every document, find duplicates, select by a query, split the selection.

Output files are row-aligned with the documents, which are not modified:

- `attributes-00000.parquet`, ...: one file per `documents-*.parquet`, with the columns of `attribute_schema`.
- `selection.parquet`: over all document files in order, `split` ("train", "validation", "test" or "") and `reason` (why
  a document was dropped; "" if it was kept).
- `duplicates-00000.parquet`, ...: the removed near and semantic duplicates, and which document stayed for each.
- `contamination.parquet`, with `decontaminate`: the documents that hold test items, and which.

Memory grows with the number of documents, not with their text: about 200 bytes per document for ids, hashes, clusters
and the split. Measures and MinHash signatures are units of work (`measures/run.py`, `deduplication/near/stages.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.attributes import (
    attribute_file_name,
    attribute_schema,
    query_attributes,
    replace_column,
    write_attributes,
)
from whorl.corpus.config import CurateConfig
from whorl.corpus.decontamination.attributes import write_contamination
from whorl.corpus.deduplication.earlier import EarlierCorpus, find_earlier
from whorl.corpus.deduplication.exact import surviving_copies
from whorl.corpus.deduplication.near.clusters import first_occurrence
from whorl.corpus.deduplication.near.stages import find_clusters
from whorl.corpus.deduplication.remove import remove_duplicates
from whorl.corpus.deduplication.semantic.vectors import TextEncoder
from whorl.corpus.mapreduce import Executor, LocalPool, UnitStore
from whorl.corpus.measures.rules import MAX_UNSPACED
from whorl.corpus.measures.run import measure_files
from whorl.corpus.splits import SPLITS, assign_splits
from whorl.errors import DataError

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
    executor: Executor | None = None,
    earlier: Sequence[EarlierCorpus] | None = None,
    encoder: TextEncoder | None = None,
) -> dict[str, Any]:
    """Write the attributes and the selection of these document files into `out`.

    Args:
        workers: processes that measure; with more than one, a script must start under `if __name__ == "__main__"`.
        units: folder of finished measurements, which later runs reuse; default a temporary folder.
        executor: where units run; default a pool of `workers`.
        earlier: those of `config.earlier`; default: it names folders.
        encoder: that of `config.semantic`.

    Returns:
        `funnel` (read, the rest after each reason, train), `dropped` (reason -> documents, bytes), `splits` (name ->
        documents, bytes, largest_document_fraction), `clusters`, `near_duplicates`; with `decontaminate`, `contamination`
        (test set -> items, found, too_short, documents); with `filters`, `without_spaces` (documents).

    Raises:
        ConfigError: a measure is unknown, or the query is invalid, or does not return `row` and `reason`.
        DataError: no document is selected, a test set is empty or cannot be read, or the corpus is too small to hold
            out a split.
    """
    import pyarrow.parquet as pq

    measures = config.measure_configs
    columns = attribute_schema(measures).names
    n_rows = sum(pq.ParquetFile(path).metadata.num_rows for path in documents)
    executor, minhash = executor or LocalPool(workers), config.minhash_config
    if earlier is None:
        earlier = [find_earlier(e if isinstance(e, str) else e.corpus) for e in config.earlier]
    contamination: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=out, prefix="scratch-") as scratch:
        store = UnitStore(units or Path(scratch, "units"))
        with progress.task("Measuring", total=n_rows * len(measures), unit="documents") as task:
            measured = measure_files(measures, documents, store, executor, advance=task.advance)
        with progress.task("Finding copies", total=len(documents), unit="files") as task:
            first = first_occurrence(_hashes(measured["text"], n_rows))
            cluster = find_clusters(documents, minhash, first, store, executor, lambda unit: task.advance(1))
        write_attributes(documents, measures, measured, _of_corpus(first, cluster), out)
        ids, n_bytes = _ids_and_sizes(documents, measured["text"])
        attributes = [out / attribute_file_name(path) for path in documents]
        query = config.selection_query
        ranks = _ranks(config.near_duplicate_order, attributes, ids)
        rows = np.arange(n_rows)
        if (first != rows).any():
            no_copies = {"exact_duplicate": "FALSE"}
            kept = query_attributes(query, "reason", attributes, columns, n_rows, replace=no_copies) == ""
            replace_column(attributes, "exact_duplicate", surviving_copies(first, kept, ranks) != rows)
        reasons = query_attributes(query, "reason", attributes, columns, n_rows)
        if config.decontaminate is not None:
            found, contamination["contamination"] = write_contamination(
                config.decontaminate, documents, out, progress, units=units, executor=executor
            )
            reasons[found[reasons[found] == ""]] = "contaminated"
        n_kept = int((reasons == "").sum())
        with progress.task("Removing duplicates", unit="documents") as task:
            remove_duplicates(
                documents, out, store, executor, reasons, ranks=ranks, earlier=earlier, semantic=config.semantic,
                minhash=config.minhash_config if config.near_duplicates == "remove" else None, encoder=encoder,
            )  # fmt: skip
            task.update(done=n_kept - int((reasons == "").sum()))
    kept = reasons == ""
    if not kept.any():
        names, counts = np.unique(reasons, return_counts=True)
        reason_counts = ", ".join(f"{name} {n}" for name, n in zip(names, counts, strict=True))
        raise DataError(
            f"the selection keeps none of {n_rows} documents: {reason_counts}",
            expected="at least one document with an empty reason",
            do="change or remove ('') a rule, such as --set 'curate.rules={too_short=\"n_bytes < 20\"}'",
        )
    split = assign_splits(ids, cluster, n_bytes, kept, config)
    _write_selection(out, split, reasons)
    return {
        **_summary(n_bytes, reasons, split, cluster),
        **contamination,
        **_without_spaces(config, attributes),
    }


def _without_spaces(config: CurateConfig, attributes: Sequence[Path]) -> dict[str, int]:
    """Return how many documents are in scripts without spaces, for which filters skip the rules of words."""
    if not config.filters:
        return {}
    shares = [t["unspaced_fraction"] for path in attributes for t in _row_groups(path, ["unspaced_fraction"])]
    return {"without_spaces": sum(int((share.to_numpy() > MAX_UNSPACED).sum()) for share in shares)}


def _hashes(measured: Sequence[Path], n: int) -> NDArray[np.uint64]:
    """Return the hash of each document's text: [n, 2]."""
    hashes, begin = np.empty((n, 2), np.uint64), 0
    for path in measured:
        for table in _row_groups(path, ["exact_hash"]):
            found = np.frombuffer(b"".join(table["exact_hash"].to_pylist()), np.uint64).reshape(-1, 2)
            hashes[begin : begin + len(found)] = found
            begin += len(found)
    return hashes


def _of_corpus(first: NDArray[np.int64], cluster: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the attributes that need a pass over all documents: name -> [n_documents]."""
    rows = np.arange(len(first))
    return {
        "exact_duplicate": first != rows,
        "cluster": cluster,
        "cluster_documents": np.bincount(cluster, minlength=len(first))[cluster],
        "near_duplicate": cluster != rows,
    }


def _ids_and_sizes(
    documents: Sequence[Path], measured: Sequence[Path]
) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
    """Return the id of each document in UTF-8, and the bytes of its text: [n_documents], [n_documents]."""
    ids = [
        np.array([name.encode() for name in table["id"].to_pylist()], np.bytes_)
        for path in documents
        for table in _row_groups(path, ["id"])
    ]
    sizes = [table["n_bytes"].to_numpy() for path in measured for table in _row_groups(path, ["n_bytes"])]
    return np.concatenate([np.zeros(0, np.bytes_), *ids]), np.concatenate([np.zeros(0, np.int64), *sizes])


def _row_groups(path: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def _ranks(order: str, attributes: Sequence[Path], ids: NDArray[np.bytes_]) -> NDArray[np.int64] | None:
    """Return each document's place in an SQL ordering of the attributes, ties by id; None without an ordering."""
    if not order:
        return None
    query = f"SELECT row, dense_rank() OVER (ORDER BY {order}) AS reason FROM attributes"
    place = query_attributes(query, "reason", attributes, [], len(ids)).astype(np.int64)
    ranks = np.empty(len(ids), np.int64)
    ranks[np.lexsort((ids, place))] = np.arange(len(ids))
    return ranks


def _write_selection(out: Path, split: NDArray[Any], reasons: NDArray[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"split": pa.array(split, pa.string()), "reason": pa.array(reasons, pa.string())}
    table: pa.Table = pa.table(columns)
    pq.write_table(table, out / "selection.parquet", compression="zstd")


def _summary(
    n_bytes: NDArray[np.int64], reasons: NDArray[Any], split: NDArray[Any], cluster: NDArray[np.int64]
) -> dict[str, Any]:
    def count(mask: NDArray[np.bool_]) -> dict[str, int]:
        return {"documents": int(mask.sum()), "bytes": int(n_bytes[mask].sum())}

    remaining = np.ones(len(n_bytes), bool)
    funnel: list[dict[str, Any]] = [{"stage": "read", **count(remaining)}]
    dropped = {reason: count(reasons == reason) for reason in sorted(set(reasons) - {""})}
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
