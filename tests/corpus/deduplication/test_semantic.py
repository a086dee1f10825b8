"""Semantic duplicates: an exhaustive search equals a loop, and a probed one finds nearly the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from whorl.corpus.deduplication.semantic.search import semantic_duplicates
from whorl.corpus.deduplication.semantic.settings import SearchConfig
from whorl.corpus.deduplication.semantic.vectors import Vectors
from whorl.errors import ConfigError, DataError


def reference(values: NDArray[np.float32], n_earlier: int, similarity: float) -> dict[int, int]:
    matched: dict[int, int] = {}
    for i in range(n_earlier, len(values)):
        for j in range(i):
            if j not in matched and float(values[i] @ values[j]) >= similarity - 1e-6:
                matched[i] = j
                break
    return matched


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(1, 2)), max_size=30),
    st.integers(0, 10),
    st.sampled_from([0.71, 0.9, 0.99]),
)
def test_one_cell_equals_reference(
    rows: list[tuple[int, int, int]], n_earlier: int, similarity: float
) -> None:
    values = np.array(rows, np.float32).reshape(-1, 3)
    known = Vectors.of(values[:n_earlier], "e")
    got = semantic_duplicates(
        Vectors.of(values[n_earlier:], "e"), SearchConfig(similarity=similarity, cells=1), earlier=known
    )
    every = Vectors.of(values, "e").values
    want = reference(every, len(known.values), similarity)
    rows_removed = (got.removed + len(known.values)).tolist()
    assert rows_removed == list(want)
    assert not set(got.matched.tolist()) & set(rows_removed)
    for i, j, cosine in zip(rows_removed, got.matched.tolist(), got.similarity.tolist(), strict=True):
        assert cosine == pytest.approx(float(every[i] @ every[j]), abs=1e-5)


def test_probes_find_planted_pairs_with_a_tenth_of_products() -> None:
    rng = np.random.default_rng(5)
    n, copies, width = 19_000, 1000, 32
    topics = rng.normal(size=(300, width))
    base = topics[rng.integers(300, size=n)] + 0.7 * rng.normal(size=(n, width))
    near = base[:copies] + 0.25 * rng.normal(size=(copies, width))
    values = Vectors.of(np.concatenate([base, near]).astype(np.float32), "e")
    full = semantic_duplicates(values, SearchConfig(similarity=0.94, cells=1))
    got = semantic_duplicates(values, SearchConfig(similarity=0.94))
    assert len(full.removed) > 900
    assert len(np.intersect1d(got.removed, full.removed)) >= 0.95 * len(full.removed)
    assert got.n_products <= 0.1 * len(values.values) ** 2 / 2
    cosine = (values.values[got.removed] * values.values[got.matched]).sum(axis=1)
    assert cosine.min() >= 0.94 - 1e-5 and not np.isin(got.matched, got.removed).any()


def test_equal_vectors_in_great_number_take_no_products() -> None:
    got = semantic_duplicates(Vectors.of(np.ones((200_000, 4), np.float32), "e"))
    assert got.removed.tolist() == list(range(1, 200_000)) and not got.matched.any()
    assert got.n_products == 1


def test_vectors_of_another_encoder_are_refused() -> None:
    values = np.eye(3, dtype=np.float32)
    with pytest.raises(DataError, match="encoder b"):
        semantic_duplicates(Vectors.of(values, "a"), earlier=Vectors.of(values, "b"))
    with pytest.raises(DataError, match="width 2"):
        semantic_duplicates(Vectors.of(values, "a"), earlier=Vectors.of(values[:2, :2], "a"))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_vectors_without_direction_are_refused(bad: float) -> None:
    with pytest.raises(DataError, match="vector 1 of e"):
        Vectors.of(np.array([[1, 0], [bad, bad]], np.float32), "e")


def test_semantic_refuses_settings_out_of_range() -> None:
    for settings_ in ({"probes": 0}, {"cells": 0}, {"similarity": 0.0}, {"points_per_centroid": 20}):
        with pytest.raises(ValidationError):
            SearchConfig(**settings_)  # type: ignore[arg-type]
    values = Vectors.of(np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32), "e")
    with pytest.raises(ConfigError, match="points per centroid"):
        semantic_duplicates(values, SearchConfig(cells=10))
