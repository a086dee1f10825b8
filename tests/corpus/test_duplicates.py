"""Near duplicates: fast signatures equal the reference, estimate Jaccard similarity, and find planted clusters."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from whorl.corpus import duplicates
from whorl.corpus.duplicates import UnionFind, minhash_signatures

TEXTS = st.lists(st.text("ab_ \n.é1", max_size=40).map(str.encode), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_minhash_block_equals_reference(texts: list[bytes]) -> None:
    want = np.array([duplicates.minhash_signature_reference(text) for text in texts])
    assert np.array_equal(minhash_signatures(texts), want)


def words(rng: random.Random, n: int) -> list[str]:
    return [f"w{rng.randrange(10**6)}" for _ in range(n)]


def clusters(texts: list[bytes]) -> NDArray[np.int64]:
    sets = UnionFind(len(texts))
    return duplicates.cluster_near_duplicates(minhash_signatures(texts), 0.5, sets).roots()


def mutate(rng: random.Random, text: list[str], changes: int) -> list[str]:
    out = list(text)
    for _ in range(changes):
        out[rng.randrange(len(out))] = f"m{rng.randrange(10**6)}"
    return out


def test_minhash_agreement_estimates_jaccard() -> None:
    rng = random.Random(0)
    errors = []
    for changes in range(0, 60, 2):
        text = words(rng, 400)
        a, b = " ".join(text).encode(), " ".join(mutate(rng, text, changes)).encode()
        sa, sb = minhash_signatures([a, b])
        errors.append(float((sa == sb).mean()) - duplicates.jaccard_similarity(a, b))
    assert abs(np.mean(errors)) < 0.02  # unbiased
    assert np.abs(errors).max() < 4 * 0.044


def test_clusters_equal_planted_families() -> None:
    rng = random.Random(1)
    texts, family = [], []
    for f in range(300):
        original = words(rng, 300)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            texts.append(" ".join(mutate(rng, original, rng.randrange(6))).encode())
            family.append(f)
    assert clusters(texts).tolist() == [family.index(f) for f in family]


def test_clusters_handle_one_huge_bucket() -> None:
    rng = random.Random(2)
    original = words(rng, 200)
    texts = [" ".join(mutate(rng, original, 1)).encode() for _ in range(3000)]
    assert not clusters(texts).any()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_union_find_matches_naive_sets(pairs: list[tuple[int, int]]) -> None:
    sets = UnionFind(31)
    naive = [{i} for i in range(31)]
    for a, b in pairs:
        sets.union(a, b)
        merged = naive[a] | naive[b]
        for member in merged:
            naive[member] = merged
    assert sets.roots().tolist() == [min(group) for group in naive]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_first_occurrence_matches_list_index(rows: list[tuple[int, int]]) -> None:
    first = duplicates.first_occurrence(np.array(rows, np.uint64))
    assert first.tolist() == [rows.index(row) for row in rows]
    assert np.array_equal(duplicates.union_exact_duplicates(first).roots(), first)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from([0.3, 0.5, 1.0]))
def test_removable_equals_pairwise_reference(texts: list[bytes], threshold: float) -> None:
    kept: list[bytes] = []
    for text, remove in zip(texts, duplicates.removable(texts, threshold), strict=True):
        assert remove == any(duplicates.jaccard_similarity(text, other) >= threshold for other in kept)
        if not remove:
            kept.append(text)
