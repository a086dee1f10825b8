"""Connected components in partitions: large-star and small-star, in rounds of the MapReduce engine.

Kiveris, Lattanzi, Mirrokni, Rastogi & Vassilvitskii 2014, Connected Components in MapReduce and Beyond. Edges are divided
by a hash of one end. In a large-star, each node u links its larger neighbors to m, the smallest of u and its neighbors; in a
small-star, u links itself and its smaller neighbors to m. Neither changes the components. After O(log^2 n) rounds, in
practice three to six, every node is linked to the smallest node of its component and to nothing else.

A unit holds the edges of its partition only: memory does not grow with the number of edges. Up to 2 * EDGES_PER_PARTITION
nodes are taken at once, by `forest`. `connected_components` of `clusters.py`, over all edges, is the reference of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.near.arrays import partitioned, power_of_two, read_arrays, write_arrays
from whorl.corpus.deduplication.near.clusters import connected_components
from whorl.corpus.deduplication.shingles import mix
from whorl.corpus.mapreduce import Executor, Input, Output, Stage, Unit, UnitStore, partition_name, shuffled

VERSION = 1
EDGES = "edges"
EDGES_PER_PARTITION = 1 << 21  # 64 MB in both directions, and several times as much for sorting
Ends = tuple[NDArray[np.int64], NDArray[np.int64]]


def whole_components(
    joined: Sequence[Output], n_documents: int, store: UnitStore, executor: Executor
) -> tuple[list[list[Input]], list[Output]]:
    """Return groups of files of edges, each with whole components only, and the outputs that were written for it.

    Args:
        joined: outputs with the file "edges": two arrays of nodes [n], [n], and the summary "edges": n.
    """
    edges = sum(o.summary["edges"] for o in joined)
    parts = power_of_two(edges / EDGES_PER_PARTITION)
    if min(edges, n_documents) <= 2 * EDGES_PER_PARTITION:
        return [[o.input(EDGES) for o in joined]], []
    names = [partition_name(number) for number in range(parts)]
    written: list[Output] = []

    def run(function: str, inputs: Sequence[Unit]) -> list[Output]:
        found = store.run(Stage(f"{__name__}:{function}", VERSION, {"partitions": parts}), inputs, executor)
        written.extend(found)
        return found

    found = run("both_directions", [Unit((o.input(EDGES),)) for o in joined])
    while True:
        large = run("large_star", shuffled(found, names))
        found = run("small_star", shuffled(large, names))
        if not sum(o.summary["changed"] for o in (*large, *found)):
            break
    # Every edge is now (node, smallest of its component): divided by that, each partition has whole components.
    last = run("by_root", shuffled(large, names))
    return [list(unit.inputs) for unit in shuffled(last, names)], written


def both_directions(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: write each edge from both ends, for the large-star."""
    a, b = _edges(inputs)
    return _write(out, np.concatenate([a, b]), np.concatenate([b, a]), config)


def large_star(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce: link the larger neighbors of each node to the smallest of it and its neighbors; from the larger end."""
    node, neighbor = _edges(inputs)
    least = np.minimum(_smallest(node, neighbor), node)
    larger = neighbor > node
    changed = int((least[larger] != node[larger]).sum())
    return _write(out, neighbor[larger], least[larger], config) | {"changed": changed}


def small_star(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce: link each node and its smaller neighbors to the smallest of these; from both ends, for the large-star."""
    node, neighbor = _edges(inputs)  # each neighbor is smaller
    least = _smallest(node, neighbor)
    others = neighbor != least
    a, b = np.concatenate([node, neighbor[others]]), np.concatenate([least, least[others]])
    found = _write(out, np.concatenate([a, b]), np.concatenate([b, a]), config)
    return found | {"changed": int(others.sum())}


def by_root(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: divide the edges (node, smallest node of its component) by the component."""
    node, root = _edges(inputs)
    return _write(out, root, node, config)


def forest(paths: Iterable[str]) -> Ends:
    """Return the nodes of files of edges, sorted, and the smallest node of the component of each.

    One file at a time: memory is that of the nodes, and of the edges of a file.
    """
    node = root = np.zeros(0, np.int64)
    for path in paths:
        a, b = read_arrays(path)[:2]
        node, index = np.unique(np.concatenate([root, a, node, b]), return_inverse=True)
        a, b = np.split(index, 2)
        root = node[connected_components(a, b, len(node))]
    return node, root


def _smallest(node: NDArray[np.int64], neighbor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the smallest neighbor of the node of each edge, which are sorted by node, then neighbor."""
    return neighbor[np.searchsorted(node, node)] if len(node) else neighbor


def _edges(inputs: Sequence[str]) -> Ends:
    """Return the distinct edges of some files, sorted by the first end, then the second."""
    read = [read_arrays(path)[:2] for path in inputs]
    a, b = (np.concatenate([np.zeros(0, np.int64), *(r[k] for r in read)]) for k in (0, 1))
    order = np.lexsort((b, a))
    a, b = a[order], b[order]
    fresh = np.ones(len(a), bool)
    fresh[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
    return a[fresh], b[fresh]


def _write(
    out: Path, node: NDArray[np.int64], neighbor: NDArray[np.int64], config: Mapping[str, Any]
) -> dict[str, int]:
    """Write edges by the partition of `node`."""
    keys = mix(node.astype(np.uint64))
    for number, some in enumerate(partitioned(keys, int(config["partitions"]))):
        write_arrays(out / partition_name(number), node[some], neighbor[some])
    return {"edges": len(node)}
