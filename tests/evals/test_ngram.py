"""The n-gram model: normalization, agreement with the formulas, and learning."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.evals.ngram import NGram

BOS, EOS, VOCAB = 0, 1, 7


def _array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint16)


def _reference(documents: list[list[int]], order: int, text: list[int]) -> list[float]:
    """log2 p of each token by the published formulas, over dictionaries of tuples."""
    pad = [BOS] * (order - 1)
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
    for document in documents:
        padded = pad + document
        for end in range(len(pad), len(padded)):
            counts[order][tuple(padded[end - order + 1 : end + 1])] += 1
    for n in range(order - 1, 0, -1):
        for gram in counts[n + 1]:
            counts[n][gram[1:]] += 1

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

    padded = pad + text
    return [
        math.log2(probability(order, tuple(padded[i : i + order - 1]), token)) for i, token in enumerate(text)
    ]


documents_of = st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=12), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(documents_of, st.integers(1, 4), st.lists(st.integers(0, VOCAB - 1), max_size=10))
def test_ngram_matches_reference_formulas(documents: list[list[int]], order: int, text: list[int]) -> None:
    if not any(documents):
        documents = [[EOS]]
    model = NGram([_array(d) for d in documents], VOCAB, order, BOS)
    assert model.log2_prob(_array(text)) == pytest.approx(_reference(documents, order, text), abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(documents_of, st.integers(1, 4), st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_ngram_sums_to_one_after_any_context(
    documents: list[list[int]], order: int, context: list[int]
) -> None:
    model = NGram([_array(d) for d in [*documents, [EOS]]], VOCAB, order, BOS)
    last = [model.log2_prob(_array([*context, token]))[-1] for token in range(VOCAB)]
    assert sum(2.0**p for p in last) == pytest.approx(1.0, abs=1e-5)


def test_ngram_learns_pattern_better_with_order() -> None:
    rng = np.random.default_rng(0)

    def document() -> np.ndarray:  # with probability 0.9 the next token is the sum of the last two
        tokens = [2, 3]
        for _ in range(200):
            tokens.append(
                (tokens[-1] + tokens[-2]) % 5 + 2 if rng.random() < 0.9 else int(rng.integers(2, 7))
            )
        return _array([*tokens, EOS])

    train, held_out = [document() for _ in range(20)], [document() for _ in range(4)]
    bits = [NGram(train, VOCAB, order, BOS).bits(held_out) / sum(map(len, held_out)) for order in (1, 2, 3)]
    assert bits[0] > 2.2 and bits[1] > 2.0
    assert bits[2] < 1.0  # the source's entropy is about 0.7


def test_ngram_documents_are_independent() -> None:
    # "3" ends every document and "4" begins the next: in one stream 4 would always follow 3.
    model = NGram([_array([4, 5, 3])] * 50, VOCAB, 3, BOS)
    assert model.log2_prob(_array([3, 4]))[1] < math.log2(0.5)
    assert model.log2_prob(_array([4, 5]))[0] > math.log2(0.9)
    assert model.bits([_array([4, 5, 3])] * 2) == pytest.approx(2 * model.bits([_array([4, 5, 3])]))


def test_ngram_empty_document_has_zero_bits() -> None:
    assert NGram([_array([2, 3])], VOCAB, 3, BOS).bits([_array([])]) == 0


@pytest.mark.parametrize("documents", [[], [_array([])]])
def test_ngram_rejects_empty_training_split(documents: list[np.ndarray]) -> None:
    with pytest.raises(DataError, match="no token"):
        NGram(documents, VOCAB, 3, BOS)
