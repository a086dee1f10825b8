"""The n-gram model: agreement with the published formulas, and normalization."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus.measures.trained.kneser_ney import NGram, _rank
from whorl.errors import DataError

BOS, EOS, VOCAB = 0, 1, 7


def _array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint16)


def _reference(documents: list[list[int]], order: int, text: list[int]) -> list[float]:
    """log2 p of each token by the published formulas, over dictionaries of tuples."""
    pad = [BOS] * (order - 1)
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
    for document in documents:
        counts[order].update(zip(*((pad + document)[i:] for i in range(order)), strict=False))
    for n in range(order - 1, 0, -1):
        counts[n].update(gram[1:] for gram in counts[n + 1])

    def discounts(n: int) -> list[float]:
        n1, n2, n3, n4 = (max(sum(c == k for c in counts[n].values()), 1) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        ideal = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        return [0.0] + [min(max(d, 0.1), k - 0.1) for k, d in enumerate(ideal, start=1)]

    followers: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(order + 1)]
    for n in range(1, order + 1):
        for gram, count in counts[n].items():
            followers[n][gram[:-1]].append(count)

    def probability(n: int, context: tuple[int, ...], token: int) -> float:
        if n == 0:
            return 1 / VOCAB
        lower = probability(n - 1, context[1:], token)
        here = followers[n].get(context)
        if not here:
            return lower
        d = discounts(n)
        count = counts[n][(*context, token)]
        gamma = sum(d[min(c, 3)] for c in here) / sum(here)
        return max(count - d[min(count, 3)], 0) / sum(here) + gamma * lower

    contexts = [tuple((pad + text)[i : i + order - 1]) for i in range(len(text))]
    return [math.log2(probability(order, c, token)) for c, token in zip(contexts, text, strict=True)]


DOCUMENTS = st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=12), min_size=1, max_size=6)


@given(DOCUMENTS, st.integers(1, 4), st.lists(st.integers(0, VOCAB - 1), max_size=10))
def test_ngram_matches_reference_formulas(documents: list[list[int]], order: int, text: list[int]) -> None:
    documents = documents if any(documents) else [[EOS]]
    model = NGram([_array(d) for d in documents], VOCAB, order, BOS)
    model = NGram.from_arrays(model.arrays())
    want = _reference(documents, order, text)
    assert model.log2_prob(_array(text)) == pytest.approx(want, abs=1e-5)
    # The contexts of a document do not reach into the one before.
    assert model.bits([_array(text), _array([]), _array(text)]) == pytest.approx(-2 * sum(want), abs=1e-4)
    sums = model.log2_sums([_array(text), _array([]), _array(text)])
    assert sums == pytest.approx([sum(want), 0, sum(want)], abs=1e-4)


@settings(max_examples=30)
@given(DOCUMENTS, st.integers(1, 4), st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(1, 3))
def test_ngram_sums_to_one_in_context(
    documents: list[list[int]], order: int, context: list[int], min_count: int
) -> None:
    model = NGram([_array(d) for d in [*documents, [EOS]]], VOCAB, order, BOS, min_count)
    last = [model.log2_prob(_array([*context, token]))[-1] for token in range(VOCAB)]
    assert sum(2.0**p for p in last) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("largest", [1, 10**6, 2**62])
def test_rank_equals_unique_with_inverse(largest: int) -> None:
    """Also for values that leave no room for their positions."""
    values = np.random.default_rng(0).integers(0, largest, 300) // max(1, largest // 50)
    values[::7] = largest - 1
    for found, want in zip(_rank(values), np.unique(values, return_inverse=True), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("documents", [[], [_array([])]])
def test_ngram_rejects_empty_training_split(documents: list[np.ndarray]) -> None:
    with pytest.raises(DataError, match="no token"):
        NGram(documents, VOCAB, 3, BOS)


def test_pruning_removes_rare_ngrams_and_keeps_frequent_ones() -> None:
    documents = [_array([2, 3, 4, EOS])] * 5 + [_array([2, 5, EOS])]
    full, pruned = NGram(documents, VOCAB, 3, BOS), NGram(documents, VOCAB, 3, BOS, min_count=2)
    assert pruned.n_grams < full.n_grams
    frequent, rare = _array([2, 3, 4, EOS]), _array([2, 5, EOS])
    np.testing.assert_allclose(pruned.log2_prob(frequent), full.log2_prob(frequent), rtol=0.2)
    assert pruned.bits([frequent]) < pruned.bits([rare])
    assert pruned.log2_prob(rare)[1] < full.log2_prob(rare)[1]
