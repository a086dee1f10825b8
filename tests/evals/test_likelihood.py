"""Bits per byte: every token is scored once, exactly if a window holds the document."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny import make_decoder
from torch.nn import functional as F

from whorl.evals.likelihood import bits_per_byte, document_nats, perplexity, scoring_windows
from whorl.models import Transformer


def decoder(trained_length: int | None = None) -> Transformer:
    return make_decoder(vocab_size=40, trained_length=trained_length).eval()


def exact(model: Transformer, ids: np.ndarray) -> float:
    """The negative log-likelihood of ids[1:] given ids[0], from one forward."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.logits(model(row[:, :-1]))
    return float(F.cross_entropy(logits[0], row[0, 1:], reduction="sum"))


@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.integers(1, 20))
def test_each_target_is_scored_in_one_window(lengths: list[int], length: int) -> None:
    documents = [np.arange(n) for n in lengths]
    seen: list[list[int]] = [[] for _ in lengths]
    for window in scoring_windows(documents, length):
        assert 2 <= len(window.ids) <= length + 1
        seen[window.document] += window.ids[1 + window.skip :].tolist()
        if window.skip:  # scored targets have at least half a window of context
            assert window.skip >= length // 2
    assert seen == [list(range(1, n)) for n in lengths]


@settings(max_examples=20)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.integers(0, 999), st.sampled_from([None, 12]))
def test_document_within_window_has_exact_nats(lengths: list[int], seed: int, trained: int | None) -> None:
    """Also if rows beyond the trained length are treated differently from short ones."""
    rng, model = np.random.default_rng(seed), decoder(trained)
    documents = [rng.integers(0, 40, n).astype(np.uint16) for n in lengths]
    progress: list[int] = []
    found = document_nats(model, documents, 32, progress.append)
    assert found == pytest.approx([exact(model, d) for d in documents], rel=1e-4)
    assert sum(progress) == sum(n - 1 for n in lengths)


def test_long_document_has_half_a_window_of_context() -> None:
    model, ids = decoder(), np.random.default_rng(0).integers(0, 40, 50)
    by_hand = 0.0
    for start, first in ((0, 1), (8, 17), (16, 25), (24, 33), (32, 41), (40, 49)):
        window = ids[start : start + 17]
        by_hand += exact(model, window) - (exact(model, window[: first - start]) if first - start > 1 else 0)
    assert document_nats(model, [ids], 16) == pytest.approx([by_hand], rel=1e-4)


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)


def test_perplexity_by_hand() -> None:
    # Two tokens with probabilities 1/2 and 1/8: the geometric mean is 1/4.
    assert perplexity(math.log(2) + math.log(8), 2) == pytest.approx(4.0)
    assert perplexity(0.0, 0) == 1.0 and perplexity(1e6, 1) == math.inf
    # A model without knowledge has the size of its vocabulary as perplexity.
    assert perplexity(10 * math.log(300), 10) == pytest.approx(300)
