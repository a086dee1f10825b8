"""Causal attention and n-gram embeddings against their definitions and torch."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import assert_same_with_gradients, gen, randn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.nn import NGramEmbedding, causal_attention, causal_attention_reference, rotary_tables
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.ngram import ngram_bucket_ids
from whorl.nn.rotary import Rotary


@pytest.mark.parametrize("length", [1, 5, 256, 257, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_attention_matches_reference_with_gradients(length: int, packed: bool) -> None:
    q, k, v = (randn(2, 3, length, 16, seed=i, grad=True) for i in range(3))
    segments = (torch.arange(length) * 3 // max(length, 1)).expand(2, -1) if packed else None
    out, want = causal_attention(q, k, v, segments), causal_attention_reference(q, k, v, segments)
    assert_same_with_gradients(out, want, (q, k, v), grad_atol=2e-5)
    if not packed:
        torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        assert_close(out, torchs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention_stays_within_segments(kv_heads: int) -> None:
    layer = MultiHeadAttention(
        32, 4, n_kv_heads=kv_heads, head_dim=8, rotary=Rotary(8, 1e4, torch.float32), qk_norm=1e-6, scale="learned",
        smear=True, projections="fused", generator=gen(),
    )  # fmt: skip
    torch.nn.init.normal_(layer.out.weight, generator=gen(1))
    a, b = randn(1, 10, 32, seed=2), randn(1, 7, 32, seed=3)

    def run(x: torch.Tensor, *lengths: int, segments: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.cat([torch.arange(n) for n in lengths])
        return layer(x, rotary_tables(positions, 8), segments)

    packed = run(torch.cat([a, b], 1), 10, 7, segments=torch.tensor([[1] * 10 + [2] * 7]))
    apart = torch.cat([run(a, 10), run(b, 7)], 1)
    assert_close(packed, apart, atol=1e-5, rtol=1e-4)


def test_ngram_buckets_match_ngrams_and_stop_at_borders() -> None:
    ids = torch.tensor([[5, 6, 7, 9, 5, 6, 7]])
    bigrams, trigrams = ngram_bucket_ids(ids, (2, 3), 65_536)
    assert bigrams[0, 1] == bigrams[0, 5] and trigrams[0, 2] == trigrams[0, 6]
    assert bigrams[0, 4] != bigrams[0, 0] and trigrams[0, 5] != trigrams[0, 1]
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    packed = ngram_bucket_ids(ids, (2, 3), 65_536, segments)
    alone = ngram_bucket_ids(ids[:, 4:], (2, 3), 65_536)
    for p, a in zip(packed, alone, strict=True):
        assert torch.equal(p[:, 4:], a)


def test_ngram_buckets_of_single_tokens_match_the_row() -> None:
    """A decoder passes the past as prefix_ids."""
    ids = torch.randint(0, 5_000, (1, 40), generator=gen())
    whole = ngram_bucket_ids(ids, (2, 3, 5), 65_536)
    padded = torch.cat([torch.full((1, 4), -1), ids], dim=1)
    for t in range(40):
        single = ngram_bucket_ids(ids[:, t : t + 1], (2, 3, 5), 65_536, prefix_ids=padded[:, t : t + 4])
        assert [int(r) for r in single] == [int(r[0, t]) for r in whole]


def test_ngram_buckets_are_uniform() -> None:
    ids = torch.randint(0, 1000, (64, 512), generator=gen())
    (rows,) = ngram_bucket_ids(ids, (2,), 256)
    counts = torch.bincount(rows.flatten(), minlength=256).float()
    chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi_square < 256 + 6 * (2 * 256) ** 0.5


def test_ngram_embedding_has_sparse_gradients() -> None:
    embedding = NGramEmbedding([2, 3], 64, 8)
    embedding(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(t.grad is not None and t.grad.is_sparse for t in embedding.tables)
