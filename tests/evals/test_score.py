"""Bits per byte: every token counted once, and exact where a window holds the document."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from whorl.evals.likelihood import bits_per_byte, document_nats, scoring_windows
from whorl.models import Decoder, DecoderConfig


def decoder(trained_length: int | None = None) -> Decoder:
    config = DecoderConfig(
        vocab_size=40,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        mlp_hidden=64,
        ngram_buckets=64,
        trained_length=trained_length,
    )
    g = torch.Generator().manual_seed(0)
    made = Decoder(config, g)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return made.eval()


def exact(model: Decoder, ids: np.ndarray) -> float:
    """The negative log-likelihood of ids[1:] given ids[0], from one forward."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.logits(model(row[:, :-1]))
    return float(F.cross_entropy(logits[0], row[0, 1:], reduction="sum"))


@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.integers(1, 20))
def test_each_target_is_new_in_exactly_one_window(lengths: list[int], length: int) -> None:
    documents = [np.arange(n) for n in lengths]
    seen: list[list[int]] = [[] for _ in lengths]
    for window in scoring_windows(documents, length):
        assert 2 <= len(window.ids) <= length + 1
        targets = window.ids[1:]
        seen[window.document] += targets[window.skip :].tolist()
        if window.skip:  # at least half a window of context for what is counted here
            assert window.skip >= length // 2
    assert seen == [list(range(1, n)) for n in lengths]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([None, 12])
)
def test_documents_within_a_window_cost_their_exact_log_likelihood(
    lengths: list[int], seed: int, trained: int | None
) -> None:
    """Also where rows beyond the trained length are read in another way than the short ones beside them."""
    rng, model = np.random.default_rng(seed), decoder(trained)
    documents = [rng.integers(0, 40, n).astype(np.uint16) for n in lengths]
    told: list[int] = []
    found = document_nats(model, documents, 32, told.append)
    assert found == pytest.approx([exact(model, d) for d in documents], rel=1e-4)
    assert sum(told) == sum(n - 1 for n in lengths)


def test_a_long_document_is_scored_with_half_a_window_of_context_at_least() -> None:
    model, ids = decoder(), np.random.default_rng(0).integers(0, 40, 50)
    by_hand = 0.0
    for start, first in ((0, 1), (8, 17), (16, 25), (24, 33), (32, 41), (40, 49)):
        window = ids[start : start + 17]
        by_hand += exact(model, window) - (exact(model, window[: first - start]) if first - start > 1 else 0)
    assert document_nats(model, [ids], 16) == pytest.approx([by_hand], rel=1e-4)


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)
