"""Connected components in partitions equal those of all edges at once, and give the same removals."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.corpus.test_duplicates import contents, corpus, run, write

from whorl.corpus.deduplication.near import stars
from whorl.corpus.deduplication.near.arrays import read_arrays, write_arrays
from whorl.corpus.deduplication.near.clusters import connected_components
from whorl.corpus.deduplication.near.stars import forest, whole_components
from whorl.corpus.mapreduce import LocalPool, Output, UnitStore
from whorl.corpus.mapreduce.units import hash_file


def test_components_in_partitions_give_the_same_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path / "in", corpus(120), 3)
    whole = run(files, tmp_path / "whole")
    assert len(whole.removed) > 10
    monkeypatch.setattr(stars, "EDGES_PER_PARTITION", 5)
    for workers in (1, 2):
        parts = run(files, tmp_path / f"parts{workers}", LocalPool(workers, isolate=True))
        for name in ("removed", "matched", "similarity"):
            assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert contents(tmp_path / "parts1") == contents(tmp_path / "parts2")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=60), st.booleans())
def test_stars_find_the_components_of_any_edges(pairs: list[tuple[int, int]], chain: bool) -> None:
    if chain:  # the deepest graph: a path through all nodes
        pairs = [*pairs, *((i, i + 1) for i in range(40))]
    pairs = [(a, b) for a, b in pairs if a != b] or [(0, 1)]
    ends = [np.array(column) for column in zip(*pairs, strict=True)]
    expected = connected_components(ends[0], ends[1], 41)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stars, "EDGES_PER_PARTITION", len(pairs) / 3)
        joined = []
        for number, half in enumerate((slice(0, None, 2), slice(1, None, 2))):
            place = Path(folder, f"join{number}")
            place.mkdir()
            write_arrays(place / "edges", ends[0][half], ends[1][half])
            files = {"edges": hash_file(place / "edges")}
            joined.append(Output(str(number), place, files, {"edges": len(ends[0][half])}))
        groups, _ = whole_components(joined, 10**9, UnitStore(Path(folder, "units")), LocalPool())
        nodes, smallest = forest([str(output.folder / "edges") for output in joined])
        found = [[read_arrays(i.path) for i in group] for group in groups]
        roots = {n: r for g in found for r, m in g for r, n in zip(r.tolist(), m.tolist(), strict=True)}
        where = [{r for r, _ in g for r in r.tolist()} for g in found]
    assert nodes.tolist() == sorted({n for pair in pairs for n in pair})
    assert smallest.tolist() == expected[nodes].tolist()
    linked = {n: int(r) for n, r in enumerate(expected) if n != r}
    assert roots == linked and sum(map(len, where)) == len(set(linked.values()))  # no component is divided
