"""The native functions of signatures compute what numpy computes, and signatures of 16 bits keep the estimate."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.compiler import needs_compiler

from whorl.corpus.deduplication.near import clusters, minhash


@needs_compiler
@given(st.integers(0, 9), st.integers(1, 40), st.sampled_from([1, 2, 8]), st.integers(0, 9))
def test_divided_keys_and_digests_equal_numpy(n: int, bands: int, partitions: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 64, (n, bands), np.uint64)
    signatures = rng.integers(0, 1 << 16, (n, bands), np.uint16)
    native = *minhash.divided_keys(keys, partitions), minhash.signature_digests(signatures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "library", lambda: None)
        expected = *minhash.divided_keys(keys, partitions), minhash.signature_digests(signatures)
    assert all(map(np.array_equal, native, expected))
    lower, counts, first = expected[:3]
    assert counts.sum() == len(lower) == first[-1] == n * bands
    changed = signatures.copy()
    if n:
        changed[0, -1] ^= 1
        assert (minhash.signature_digests(changed) != expected[3]).tolist() == [True] + [False] * (n - 1)


@needs_compiler
def test_joined_buckets_equal_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    signatures = [rng.integers(0, 2, (20, 8), np.uint16), rng.integers(0, 2, (30, 8), np.uint16)]
    keys = rng.integers(0, 6, 400, np.uint32) << np.uint32(29)
    documents = rng.integers(0, 50, 400)

    def joined() -> list[int]:
        parent = np.arange(50)
        text_file = np.arange(50) // 5 % 5  # of 0, all are joined
        clusters.join_buckets(keys.copy(), documents.copy(), signatures, 0.9, text_file, parent)
        return clusters.flattened(parent).tolist()

    native = joined()
    monkeypatch.setattr(clusters, "library", lambda: None)
    assert native == joined() and 1 < len(set(native)) < 50


def test_lower_bits_of_hashes_agree_where_hashes_do() -> None:
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefgh", k=6)) for _ in range(3000)]
    texts = [" ".join(words[a : a + 300]).encode() for a in range(0, 2700, 20)]
    signatures = minhash.minhash_signatures(texts)
    lower = signatures.astype(np.uint16)
    same = (signatures[:, None] == signatures[None]).sum(axis=2)
    agreed = (lower[:, None] == lower[None]).sum(axis=2)
    assert (agreed >= same).all() and (agreed - same).mean() < 0.02  # of 128; expected 0.002
