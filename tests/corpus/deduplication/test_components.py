"""Connected components of files of edges equal those of all edges at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus.deduplication.near.arrays import write_arrays
from whorl.corpus.deduplication.near.clusters import connected_components, forest


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=60), st.booleans())
def test_forest_finds_the_components_of_any_edges(pairs: list[tuple[int, int]], chain: bool) -> None:
    if chain:  # the deepest graph: a path through all nodes
        pairs = [*pairs, *((i, i + 1) for i in range(40))]
    pairs = [(a, b) for a, b in pairs if a != b] or [(0, 1)]
    ends = [np.array(column) for column in zip(*pairs, strict=True)]
    expected = connected_components(ends[0], ends[1], 41)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in "ab"]
        for number, path in enumerate(files):
            write_arrays(path, ends[0][number::2], ends[1][number::2])
        nodes, smallest = forest(map(str, files))
    assert nodes.tolist() == sorted({n for pair in pairs for n in pair})
    assert smallest.tolist() == expected[nodes].tolist()
