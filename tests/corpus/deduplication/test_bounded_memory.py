"""Memory per document: stages that stream a file, and results that do not depend on the size of their blocks."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.corpus.test_duplicates import corpus, run, write

from whorl.corpus import CurateConfig, attributes
from whorl.corpus.attributes import query_attributes
from whorl.corpus.deduplication.near import sign as signing
from whorl.corpus.deduplication.near import stages
from whorl.corpus.deduplication.near.arrays import read_arrays
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.deduplication.shingles import TextBlock
from whorl.corpus.splits import assign_splits
from whorl.errors import ConfigError, DataError


def peak_of_signing(folder: Path, n: int) -> int:
    texts = [f"one two three four five six {i % 50}" for i in range(n)]
    table: Any = pa.table({"id": [str(i) for i in range(n)], "text": texts})
    folder.mkdir()
    pq.write_table(table, folder / "documents.parquet", row_group_size=2048)
    config = MinHashConfig().signature_fields() | {"partitions": 2}
    tracemalloc.start()
    try:
        found = signing.sign([str(folder / "documents.parquet")], folder, config, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["documents"] == n == len(read_arrays(folder / signing.SIGNATURES)[0])
    return peak


def test_signing_memory_does_not_grow_with_documents(tmp_path: Path) -> None:
    few, many = (peak_of_signing(tmp_path / str(n), n) for n in (10_000, 40_000))
    assert many < 1.1 * few < 30e6  # the signatures of 40,000 have 20 MB, the records 15 MB


def test_block_sizes_do_not_change_removals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus(80)
    files = write(tmp_path / "in", texts)
    whole = run(files, tmp_path / "whole")
    assert len(whole.removed) > 10
    one = write(tmp_path / "one", texts, 1)  # a single row group
    pq.write_table(pq.read_table(one[0]), one[0])
    monkeypatch.setattr(stages, "RECORDS_PER_PARTITION", 500)
    monkeypatch.setattr(stages, "SHINGLES_PER_PARTITION", 700)
    blocks = TextBlock.blocks
    monkeypatch.setattr(TextBlock, "blocks", lambda self: blocks(self, 1000))
    parts, single = run(files, tmp_path / "parts"), run(one, tmp_path / "single")
    for name in ("removed", "matched", "similarity"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    rows = np.cumsum([0, *whole.n_documents])[whole.removed >> 32] + (whole.removed & 0xFFFFFFFF)
    assert rows.tolist() == single.removed.tolist()


def splits_reference(
    ids: list[str], cluster: list[int], n_bytes: list[int], kept: list[bool], config: CurateConfig
) -> list[str] | None:
    """Choose clusters one after the other; None: the corpus is too small."""
    rows = [i for i, is_kept in enumerate(kept) if is_kept]
    split = ["train" if is_kept else "" for is_kept in kept]
    weight = {c: sum(n_bytes[i] for i in rows if cluster[i] == c) for c in {cluster[i] for i in rows}}

    def place(row: int) -> bytes:
        return hashlib.blake2b(f"{config.seed}\0{ids[row]}".encode(), digest_size=16).digest()

    order, total = sorted(weight, key=place), sum(weight.values())
    for name, target in (("test", config.test_bytes), ("validation", config.validation_bytes)):
        most = int(min(target, total * config.max_held_out_fraction))
        largest = min(most, max(most * config.max_cluster_fraction, float(np.median(list(weight.values())))))
        eligible = [row for row in order if weight[row] <= largest]
        taken, filled = set[int](), 0
        for row in eligible[: max(len(eligible) // 3, 1)]:
            if filled + weight[row] > most:
                break
            taken.add(row)
            filled += weight[row]
        if not taken:
            return None
        for i in rows:
            split[i] = name if cluster[i] in taken else split[i]
        order = [row for row in order if row not in taken]
    return split


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 90), st.booleans()), min_size=1, max_size=60),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.4]),
)
def test_splits_equal_choosing_one_by_one(
    documents: list[tuple[int, int, bool]], seed: int, fraction: float
) -> None:
    groups, sizes, kept = map(list, zip(*documents, strict=True))
    if not any(kept):
        return
    cluster = [groups.index(group) for group in groups]  # the row of the first document
    ids = [f"document é {row}" for row in range(len(documents))]
    config = CurateConfig(seed=seed, max_held_out_fraction=fraction, test_bytes=500, validation_bytes=300)
    wanted = splits_reference(ids, cluster, sizes, kept, config)
    names: NDArray[np.bytes_] = np.array([name.encode() for name in ids])
    arguments = names, np.array(cluster), np.array(sizes), np.array(kept), config
    if wanted is None:
        with pytest.raises(DataError, match="too small to hold out"):
            assign_splits(*arguments)
    else:
        assert assign_splits(*arguments).tolist() == wanted


def test_queries_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "QUERY_BATCH_ROWS", 3)
    monkeypatch.setattr(attributes, "MAX_SHARED", 2)
    table: Any = pa.table({"row": range(10)})
    pq.write_table(table, tmp_path / "attributes-00000.parquet")
    files = [tmp_path / "attributes-00000.parquet"]

    def values(query: str) -> list[str]:
        return list(query_attributes(query, "reason", files, ["row"], 10))

    odd = values("SELECT row, row % 4 AS reason FROM attributes WHERE row % 2 = 1 ORDER BY row DESC")
    assert odd == [str(row % 4) if row % 2 else "not_selected" for row in range(10)]
    for row in ("row // 8 * row", "row * 2"):
        with pytest.raises(ConfigError, match="unknown rows, or a row more than once"):
            values(f"SELECT {row} AS row, '' AS reason FROM attributes")
