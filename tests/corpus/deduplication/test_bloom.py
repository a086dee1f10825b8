"""The Bloom filter equals one that adds key by key, and its false-positive rate is that of the formula."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus.deduplication import bloom
from whorl.corpus.deduplication.bloom import BloomFilter, text_keys
from whorl.errors import ConfigError

KEYS = st.lists(st.lists(st.integers(0, 12), max_size=12), max_size=4)


@settings(max_examples=200, deadline=None)
@given(KEYS, st.integers(1, 6), st.sampled_from([0.5, 0.1]))
def test_batches_equal_adding_one_by_one(batches: list[list[int]], n: int, rate: float) -> None:
    filled, single, bits = BloomFilter(n, rate), BloomFilter(n, rate), set[int]()
    for batch in batches:
        keys = np.array(batch, np.uint64)
        got = filled.add(keys).tolist()
        assert got == [bool(single.add(keys[i : i + 1])[0]) for i in range(len(keys))]
        want = []  # reference: a set of bit numbers
        for own in filled._positions(keys).tolist():
            want.append(bits >= set(own))
            bits |= set(own)
        assert got == want
        assert filled.contains(keys).all()
    assert filled.n_added == single.n_added


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_false_positive_rate_matches_formula(rate: float) -> None:
    n, queries = 20_000, 400_000
    keys = text_keys(map(str, range(n + queries)))
    filled = BloomFilter(n, rate)
    filled.add(keys[:n])
    assert filled.contains(keys[:n]).all()
    measured = float(filled.contains(keys[n:]).mean())
    k, m = filled.n_hashes, filled.n_bits
    formula = (1 - math.exp(-k * n / m)) ** k
    # Variance of the sample, and of the share of set bits: at most e^-a (1 - e^-a) / m for a = k n / m.
    empty = math.exp(-k * n / m)
    fill = k * math.sqrt(empty * (1 - empty) / m) / (1 - empty)
    sigma = math.sqrt(formula * (1 - formula) / queries + (formula * fill) ** 2)
    assert abs(measured - formula) < 5 * sigma
    # The filter's own figure is that of the bits that are set.
    assert abs(filled.false_positive_rate() - formula) < 5 * formula * fill and formula <= rate * 1.02
    assert filled.n_added <= n


def test_threads_that_add_equal_keys_find_each_new_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bloom, "_CHUNK_KEYS", 64)
    keys = text_keys(map(str, range(4000)))
    filled = BloomFilter(10 * len(keys), 1e-9)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            present = list(pool.map(filled.add, [keys] * 4))
    finally:
        sys.setswitchinterval(interval)
    assert ((~np.array(present)).sum(axis=0) == 1).all()
    assert filled.n_added == len(keys)


def test_batch_longer_than_a_chunk_finds_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bloom, "_CHUNK_KEYS", 3)
    keys = text_keys(["a", "b", "a", "c", "b", "d", "d"])
    assert BloomFilter(100, 1e-6).add(keys).tolist() == [False, False, True, False, True, False, True]


def test_text_keys_of_surrogates_and_no_text() -> None:
    assert len(text_keys([])) == 0
    assert len(set(text_keys(["", "\ud800", "a", "a"]).tolist())) == 3


@pytest.mark.parametrize(("n", "rate"), [(0, 0.1), (1, 0.0), (1, 1.0)])
def test_bloom_refuses_impossible_sizes(n: int, rate: float) -> None:
    with pytest.raises(ConfigError, match="false-positive rate"):
        BloomFilter(n, rate)
