"""The BPE trainer: equal to its reference, for any order, cut or number of workers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.tokens import bpe, pretokens
from whorl.tokens.tokenizer import EOS, Tokenizer

# Few letters: runs (aaaa), touching pairs (abab), and two spellings of one token (a+bc, ab+c) are common.
few_letters = st.binary(min_size=1, max_size=14).map(lambda word: bytes(b"aab c"[b % 5] for b in word))
words = few_letters | st.binary(min_size=1, max_size=8)
any_counts = st.dictionaries(words, st.integers(1, 9), max_size=14)


@settings(max_examples=300, deadline=None)
@given(any_counts, st.integers(256, 300), st.integers(1, 4))
def test_train_matches_naive(counts: dict[bytes, int], n_tokens: int, min_count: int) -> None:
    fast = bpe.train(counts, n_tokens, min_count=min_count)
    assert fast == bpe.train_naive(counts, n_tokens, min_count=min_count)


@settings(max_examples=50, deadline=None)
@given(any_counts, st.randoms(use_true_random=False))
def test_train_ignores_order_of_text(counts: dict[bytes, int], order: random.Random) -> None:
    items = list(counts.items())
    order.shuffle(items)
    assert bpe.train(dict(items), 290) == bpe.train(counts, 290)


@pytest.mark.parametrize(
    ("counts", "first"),
    [
        ({b"ab": 3, b"cd": 3}, b"cd"),
        ({b"ab": 3, b"cd": 3, b"ce": 3}, b"ce"),
        ({b"cd": 3, b"ab": 4}, b"ab"),  # a higher count wins
        ({b"\xff\x00": 2, b"\xfe\xff": 2}, b"\xff\x00"),
        ({b"ax": 2, b"ay": 2}, b"ay"),  # the left halves tie, the right half decides
    ],
)
def test_train_breaks_ties_by_greatest_pair(counts: dict[bytes, int], first: bytes) -> None:
    assert bpe.train(counts, 257)[256] == first


def test_train_breaks_ties_by_longer_left_half() -> None:
    # After "ab" is made, (ab, c) and (a, d) tie at 2: pairs compare half by half, and "ab" > "a".
    counts = {b"abc": 2, b"ab": 3, b"ad": 2}
    assert bpe.train(counts, 258)[256:] == [b"ab", b"abc"]


def test_train_stops_when_pairs_run_out() -> None:
    assert bpe.train({b"abc": 1}, 300) == [bytes([i]) for i in range(256)]
    assert bpe.train({}, 300) == [bytes([i]) for i in range(256)]


def test_count_pretokens_removes_special_tokens() -> None:
    text = f"one{EOS}two{EOS}<|tool|>s{EOS}" * 50
    assert pretokens.count_pretokens([text], [EOS, "<|tool|>"]) == Counter({b"one": 50, b"two": 50, b"s": 50})
    tokenizer = Tokenizer.train([text], 300, special_tokens=["<|tool|>"])
    learnt = tokenizer.token_bytes[256 : tokenizer.n_ordinary]
    assert learnt and not any(set(b"<|>") & set(token) for token in learnt)


def test_count_pretokens_with_workers_matches_serial() -> None:
    text = "def é(x):\n    return x + 12345\n" * 20000  # enough for a process pool
    texts = [text[i * 10_000 : (i + 1) * 10_000] + f"{i}" for i in range(len(text) // 10_000)] * 8
    texts.append("last\ud800")
    assert sum(map(len, texts)) > 4 << 20
    assert pretokens.count_pretokens(texts, workers=2) == pretokens.count_pretokens(texts, workers=1)
