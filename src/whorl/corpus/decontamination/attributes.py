"""The matches of a corpus with its test sets, as a side file of the documents: `contamination.parquet`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.config import DecontaminationConfig
from whorl.corpus.decontamination.items import ItemIndex, TestItem, read_test_set
from whorl.corpus.decontamination.match import Contamination, find_contamination
from whorl.corpus.mapreduce import Executor

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress

CONTAMINATION_FILE = "contamination.parquet"
NAMED_ITEMS = 5  # in a warning


def read_items(config: DecontaminationConfig) -> list[TestItem]:
    """Return the items of the configured files. Raises as `read_test_set`."""
    return [item for tests in config.tests for item in read_test_set(tests.files, tests.field)]


def fingerprint_items(items: Iterable[TestItem]) -> str:
    """Return a hash of the ids and texts of items, for the address of what was decontaminated with them."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        for part in (item.id, item.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8) + data)
    return digest.hexdigest()


def write_contamination(
    config: DecontaminationConfig, documents: Sequence[Path], out: Path, progress: Progress, *,
    units: Path | None = None, executor: Executor | None = None,
) -> tuple[NDArray[np.int64], dict[str, Any]]:  # fmt: skip
    """Write the documents that hold test items to `out/contamination.parquet`.

    Args:
        units, executor: see `find_contamination`.

    Returns:
        The rows of these documents, and test set -> number of items, of those found, too short to be found, documents.

    Raises:
        DataError: a test set is empty or cannot be read, or all items are too short.
    """
    import pyarrow.parquet as pq

    items = read_items(config)
    index = ItemIndex.build(items, config.n, config.min_words)
    if index.too_short:
        names = ", ".join(item.id for item in index.too_short[:NAMED_ITEMS])
        more = len(index.too_short) - NAMED_ITEMS
        progress.log(
            f"    warning: {len(index.too_short)} of {len(items)} test items have fewer than "
            f"{config.min_words or config.n} words and cannot be found: {names}{f' and {more} more' if more > 0 else ''}; "
            "set decontaminate.min_words"
        )
    total = sum(pq.ParquetFile(path).metadata.num_rows for path in documents)
    with progress.task("Decontaminating", total=total, unit="documents") as task:
        found = find_contamination(
            documents, index, min_score=config.min_score, units=units, executor=executor, advance=task.advance
        )
    _write(found, index, out / CONTAMINATION_FILE)
    return np.array([match.row for match in found], np.int64), _summary(found, index)


def _write(found: Sequence[Contamination], index: ItemIndex, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table(
        {
            "row": pa.array([m.row for m in found], pa.int64()),
            "test_set": pa.array([index.items[m.item].test_set for m in found], pa.string()),
            "item": pa.array([index.items[m.item].id for m in found], pa.string()),
            "begin_word": pa.array([m.begin for m in found], pa.int64()),
            "end_word": pa.array([m.end for m in found], pa.int64()),
            "score": pa.array([m.score for m in found], pa.float64()),
        }
    )
    pq.write_table(table, path, compression="zstd")


def _summary(found: Sequence[Contamination], index: ItemIndex) -> dict[str, dict[str, int]]:
    sets: dict[str, dict[str, int]] = {}
    for item in [*index.items, *index.too_short]:
        entry = sets.setdefault(item.test_set, {"items": 0, "found": 0, "too_short": 0, "documents": 0})
        entry["items"] += 1
    for item in index.too_short:
        sets[item.test_set]["too_short"] += 1
    for match in found:
        sets[index.items[match.item].test_set]["documents"] += 1
    for number in {match.item for match in found}:
        sets[index.items[number].test_set]["found"] += 1
    return sets
