"""Near duplicates of whole corpora, as map and reduce stages over document files.

    sign        map     a file's texts -> signatures, and the records (key of a band, row) by a range of the keys
    join        reduce  records of a range of keys -> edges between documents whose estimated similarity is high enough
    components  reduce  all edges -> the component of every document that has a candidate, one file per document file
    gather      map     a file's texts -> the sets of shingles of such documents, by component
    remove      reduce  the sets of whole components -> which documents are removed, for which one that stays

A document is `file << 32 | row`, so a changed file changes no number of another. Files of earlier corpora come first. Their
documents stay, and their units are reused.

Memory: `sign` and `gather` hold a row group. `join` holds the records of its range (24 bytes each, about 4 million) and 17
bytes per document. `components` needs about 100 bytes per document that has a candidate. `remove` reads sets from memory
maps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.near.arrays import (
    partitioned,
    power_of_two,
    read_arrays,
    write_arrays,
)
from whorl.corpus.deduplication.near.clusters import flattened, forest, join_buckets
from whorl.corpus.deduplication.near.sign import (
    SIGNATURES,
    count_rows,
    partition_names,
    read_records,
    stage_settings,
    text_files,
)
from whorl.corpus.deduplication.near.verify import ShingleSets, matches
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.deduplication.shingles import TextBlock, unique_shingles
from whorl.corpus.mapreduce import (
    Executor,
    Input,
    Output,
    Stage,
    Unit,
    UnitStore,
    partition_name,
    shuffled,
)
from whorl.tracking.seeds import splitmix64

VERSION, REMOVE_VERSION = 7, 7
EDGES = "edges"
RECORDS_PER_PARTITION = 1 << 22  # 48 MB, and as much for sorting
SHINGLES_PER_PARTITION = 1 << 25  # 256 MB
MEMBERS, MATCHES = "members-{:05d}", "matches"


@dataclass(frozen=True)
class NearDuplicates:
    """Removed documents, in order. A document is the number of its file << 32 | its row in the file.

    removed: [n]; matched: [n] the document that stays; similarity: [n] exact. n_documents: of each file.
    """

    removed: NDArray[np.int64]
    matched: NDArray[np.int64]
    similarity: NDArray[np.float64]
    n_documents: list[int]


def find_near_duplicates(
    documents: Sequence[Path], config: MinHashConfig, store: UnitStore, executor: Executor, *,
    earlier: Sequence[Path] = (), ranks: NDArray[np.int64] | None = None, candidates: NDArray[np.bool_] | None = None,
    earlier_candidates: NDArray[np.bool_] | None = None,
) -> NearDuplicates:  # fmt: skip
    """Return which documents are removed, and for which ones that stay.

    Args:
        documents: Parquet files with the columns id and text.
        earlier: files of earlier corpora. Their documents stay; file numbers count from the first of these.
        ranks: [all rows of `documents`] the smallest of several near duplicates stays; default: the order of rows.
        candidates: [all rows of `documents`] documents that are compared; default: all.
        earlier_candidates: [all rows of `earlier`] the same.
    """
    inputs = [Input.of(path) for path in (*earlier, *documents)]
    signed = _sign(inputs, config, store, executor)
    fields = config.signature_fields()
    counts = [int(o.summary["documents"]) for o in signed]
    signatures = tuple(o.input(SIGNATURES) for o in signed)
    joined = store.run(
        Stage(f"{__name__}:join", VERSION, fields | {"join_similarity": config.join_similarity}),
        [Unit(unit.inputs, covered=signatures) for unit in shuffled(signed, partition_names(signed))], executor,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        n_earlier = sum(counts[: len(earlier)])
        chosen = np.concatenate([
            np.ones(n, bool) if mask is None else mask
            for n, mask in ((n_earlier, earlier_candidates), (sum(counts) - n_earlier, candidates))
        ])  # fmt: skip
        ordering = _write_ordering(Path(scratch), ranks, chosen)
        edges = Unit((*ordering, *(o.input(EDGES) for o in joined)), {"ordering": len(ordering)})
        stage = Stage(f"{__name__}:components", VERSION, {"counts": counts, "earlier": len(earlier)})
        (found_components,) = store.run(stage, [edges], executor)
    share = found_components.summary["members"] / max(sum(counts), 1)
    shingles = share * sum(o.summary["shingles"] for o in signed)
    parts = power_of_two(shingles / SHINGLES_PER_PARTITION)
    gathered = store.run(
        Stage(f"{__name__}:gather", VERSION, fields | {"partitions": parts}),
        [Unit((i, found_components.input(MEMBERS.format(n)))) for n, i in enumerate(inputs)], executor,
    )  # fmt: skip
    found = store.run(
        Stage(f"{__name__}:remove", REMOVE_VERSION, config.model_dump(mode="json") | {"earlier": len(earlier)}),
        shuffled(gathered, [partition_name(p) for p in range(parts)]), executor,
    )  # fmt: skip
    columns = [read_arrays(o.folder / MATCHES) for o in found]
    removed, matched, similarity = (np.concatenate([c[k] for c in columns]) for k in range(3))
    order = np.argsort(removed)
    return NearDuplicates(removed[order], matched[order], similarity[order], counts)


def find_clusters(
    documents: Sequence[Path], config: MinHashConfig, first: NDArray[np.int64], store: UnitStore, executor: Executor,
    advance: Callable[[Unit], Any] = lambda unit: None,
) -> NDArray[np.int64]:  # fmt: skip
    """Return the smallest member of each document's cluster: [n_documents]. See `clusters.py`.

    `find_near_duplicates` with the same store reuses the signatures.

    Args:
        first: [n_documents] the first of each document's exact duplicates; the others are not compared.
        advance: called for each file when it is signed.
    """
    signed = _sign([Input.of(path) for path in documents], config, store, executor, advance)
    signatures = [read_arrays(o.folder / SIGNATURES)[0] for o in signed]
    is_first, parent = first == np.arange(len(first)), first.copy()
    pieces = np.concatenate([np.zeros(0, np.int64), *(text_files(str(path)) for path in documents)])
    for name in partition_names(signed):
        keys, records = read_records([str(o.folder / name) for o in signed], signatures, is_first)
        join_buckets(keys, records, signatures, config.similarity, pieces, parent)
    return flattened(parent)


def _sign(
    inputs: Sequence[Input], config: MinHashConfig, store: UnitStore, executor: Executor,
    advance: Callable[[Unit], Any] = lambda unit: None,
) -> list[Output]:  # fmt: skip
    partitions = power_of_two(sum(count_rows(i.path) for i in inputs) * config.bands / RECORDS_PER_PARTITION)
    stage = Stage(
        "whorl.corpus.deduplication.near.sign:sign",
        VERSION,
        config.signature_fields() | {"partitions": partitions},
    )
    return store.run(stage, [Unit((i,)) for i in inputs], executor, advance)


def join(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce: write the edges of a spanning forest over the documents of a partition that are similar enough."""
    half = len(inputs) // 2
    signatures = [read_arrays(path)[0] for path in inputs[half:]]
    first = np.cumsum([0, *map(len, signatures)], dtype=np.int64)
    keys, documents = read_records(inputs[:half], signatures)
    parent = np.arange(first[-1])
    unknown = np.zeros(len(parent), np.int64)  # `remove` does not compare pieces of one text
    join_buckets(keys, documents, signatures, float(config["join_similarity"]), unknown, parent)
    parent = flattened(parent)
    children = np.flatnonzero(parent != np.arange(len(parent)))
    ends = [_numbers(some, first) for some in (parent[children], children)]
    write_arrays(out / EDGES, *ends)
    return {"edges": len(children)}


def components(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce all edges: write, for every document file, its rows with candidates, their components and ranks."""
    n_ordering, counts = int(arguments["ordering"]), config["counts"]
    nodes, root = forest(inputs[n_ordering:])
    first = np.cumsum([0, *counts], dtype=np.int64)
    n_earlier = int(first[int(config["earlier"])])
    if n_ordering:
        ranks, candidates = read_arrays(inputs[0])
        kept = candidates[first[nodes >> 32] + (nodes & 0xFFFFFFFF)]
        nodes, root = nodes[kept], root[kept]
    row = first[nodes >> 32] + (nodes & 0xFFFFFFFF) - n_earlier
    rank = nodes.copy()
    if n_ordering and len(ranks):
        rank[row >= 0] = ranks[row[row >= 0]]
    rank = _places(root, rank)
    bounds = np.searchsorted(nodes, np.arange(len(counts) + 1, dtype=np.int64) << 32)
    for file in range(len(counts)):
        some = slice(bounds[file], bounds[file + 1])
        local = (nodes[some] & 0xFFFFFFFF).astype(np.uint32)
        write_arrays(out / MEMBERS.format(file), local, root[some], rank[some])
    return {"members": len(nodes), "components": len(np.unique(root))}


def gather(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: write the sets of shingles of a file's documents that have candidates, by the partition of their component.

    Equal texts of a row group share a set. A partition has the seven arrays of `remove` for each row group.
    """
    settings, partitions = stage_settings(config), int(config["partitions"])
    rows, root, rank = read_arrays(inputs[1])
    pieces = text_files(inputs[0])[rows]
    for part in range(partitions):
        write_arrays(out / partition_name(part))
    start = total = 0
    for texts, which in _selected_groups(inputs[0], rows, settings):
        sets_of = [unique_shingles(texts.part(a, b), settings) for a, b in texts.blocks()]
        values = np.concatenate([values for values, _ in sets_of])
        sizes = np.concatenate([np.diff(bounds) for _, bounds in sets_of])
        first = np.cumsum(sizes) - sizes
        own = slice(start, start + len(which))
        for part, some in enumerate(partitioned(splitmix64(root[own].astype(np.uint64)), partitions)):
            sets, local = np.unique(which[some], return_inverse=True)
            taken = values if partitions == 1 else values[_ranges(first[sets], sizes[sets])]
            columns = *(a[own][some] for a in (rows, root, rank, pieces)), local, sizes[sets], taken
            write_arrays(out / partition_name(part), *columns, append=True)
        start, total = own.stop, total + len(values)
    return {"shingles": total}


def remove(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce: write which documents of whole components are removed, for which one, and their exact similarity."""
    earlier = int(config["earlier"])
    settings = MinHashConfig(**{k: v for k, v in config.items() if k != "earlier"})
    columns: list[list[NDArray[Any]]] = [[np.zeros(0, kind)] for kind in (*[np.int64] * 7, bool)]
    values: list[NDArray[np.uint64]] = []
    for file, path in enumerate(inputs):
        arrays = read_arrays(path)
        for at in range(0, len(arrays), 7):
            rows, root, rank, pieces, local, sizes, taken = arrays[at : at + 7]
            begin = (np.cumsum(sizes) - sizes)[local]
            part, is_new = np.full(len(rows), len(values)), np.full(len(rows), file >= earlier)
            values.append(taken)
            document = rows + (np.int64(file) << 32)
            found = document, root, rank, pieces * is_new, part, begin, sizes[local], is_new
            for column, some in zip(columns, found, strict=True):
                column.append(some)
    document, root, rank, pieces, part, begin, length, is_new = (np.concatenate(c) for c in columns)
    order = np.lexsort((document, rank, is_new, root))
    sets = ShingleSets(values, part[order], begin[order], length[order])
    matched, similarity = matches(sets, root[order], pieces[order], ~is_new[order], settings)
    gone = np.flatnonzero(matched >= 0)
    document = document[order].astype(np.int64)
    write_arrays(out / MATCHES, document[gone], document[matched[gone]], similarity[gone])
    return {"removed": len(gone)}


def _numbers(documents: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return file << 32 | row of documents that are counted over all files."""
    file = np.searchsorted(first, documents, side="right") - 1
    return file << 32 | (documents - first[file])


def _places(group: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each member in its group, from 0: unlike ranks, it does not depend on other groups."""
    order = np.lexsort((rank, group))
    ordered = group[order]
    begins = np.searchsorted(ordered, ordered)
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order)) - begins
    return places


def _ranges(first: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions first[i] .. first[i] + sizes[i] - 1 of all i in order."""
    before = np.cumsum(sizes) - sizes
    found: NDArray[np.int64] = np.arange(int(sizes.sum())) + np.repeat(first - before, sizes)
    return found


def _write_ordering(
    folder: Path, ranks: NDArray[np.int64] | None, candidates: NDArray[np.bool_]
) -> tuple[Input, ...]:
    if ranks is None and candidates.all():
        return ()
    path = folder / "ordering"
    write_arrays(path, np.zeros(0, np.int64) if ranks is None else ranks, candidates)
    return (Input.of(path),)


def _selected_groups(path: str, rows: NDArray[np.uint32], config: MinHashConfig) -> Any:
    """Yield, for each row group with selected rows, their distinct texts, and which of these each row has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        begin = 0
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            inside = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)].astype(np.int64) - begin
            if len(inside):
                column = file.read_row_group(group, columns=["text"])["text"].cast(pa.large_string())
                # `pa.array` of a numpy array would import pandas.
                chosen = pa.Array.from_buffers(pa.int64(), len(inside), [None, pa.py_buffer(inside)])
                encoded = column.take(chosen).combine_chunks().dictionary_encode()
                yield (
                    TextBlock.of_column(encoded.dictionary, config),
                    np.frombuffer(encoded.indices.buffers()[1], np.int32, len(inside)).astype(np.int64),
                )
            begin = end
