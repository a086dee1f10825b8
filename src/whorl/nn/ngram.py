"""N-gram embedding: one embedding row for each hash of the last n token ids.

    x_t += sum over n of table_n[hash(ids[t-n+1 .. t]) mod buckets]

The prediction after two or three given tokens is mostly a table lookup, which costs no matrix products: a row read and,
in the backward, a row written. With these rows, a transformer does not have to learn an n-gram model in its layers.
Sources: hash embeddings (Svenstrup et al. 2017, arXiv:1709.03933); over-encoding (Huang et al. 2025, Over-Tokenized
Transformer, arXiv:2501.16975). The gain is measured in bench/plan/ablations.py.

The subtle part: the gradient of a table is sparse (a few thousand rows of hundreds of thousands). Lookups use sparse
gradients outside compiled regions, and the optimizer updates those rows only. An n-gram that would cross the start of
a document has a boundary mark for the missing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError

T = TypeVar("T", int, Tensor)

_MULTIPLIER = 0x9E3779B1  # Fibonacci hashing (Knuth, TAOCP vol. 3, 6.4): 2^32 / golden ratio
_MASK = (1 << 32) - 1


def ngram_bucket_ids(
    ids: Tensor,
    orders: Sequence[int],
    buckets: int,
    segments: Tensor | None = None,
    prefix_ids: Tensor | None = None,
) -> list[Tensor]:
    """Return the row number of the n-gram that ends at each position: one [B, T] int64 tensor per order, 0..buckets-1.

    ids: [B, T] integers; segments: [B, T] or None; prefix_ids: [B, K] ids that precede the row (a decoder's state),
    -1 where none exist.
    """
    reach = max(orders) - 1
    if prefix_ids is None:
        prefix_ids = ids.new_full((ids.shape[0], reach), -1, dtype=torch.int64)
    padded = torch.cat([prefix_ids[:, prefix_ids.shape[1] - reach :], ids.long()], dim=1)  # [B, reach + T]
    length = ids.shape[1]
    # Decoding on a CPU: Python integers replace thirty tiny tensor operations.
    if padded.shape == (1, reach + 1) and padded.device.type == "cpu":
        *earlier, last = padded[0].tolist()
        return [
            ids.new_tensor([[row]], dtype=torch.int64) for row in _hash(last, earlier[::-1], orders, buckets)
        ]
    past = []
    for back in range(1, reach + 1):
        previous = padded[:, reach - back : reach - back + length]
        if segments is not None:
            same = F.pad(segments[:, back:] == segments[:, :-back], (min(back, length), 0), value=False)
            previous = torch.where(same[:, :length], previous, -1)
        past.append(previous)
    return _hash(ids.long(), past, orders, buckets)


def _hash(last: T, past: Sequence[T], orders: Sequence[int], buckets: int) -> list[T]:
    """Return the rows of the n-grams that end with `last`. past: the ids before it, nearest first, -1 where none exist."""
    rows, state = [], (last + 1) * _MULTIPLIER & _MASK
    for back, previous in enumerate(past, start=1):
        state = ((state ^ (state >> 15)) * 0x2C1B3C6D + (previous + 2) * _MULTIPLIER) & _MASK
        if back + 1 in orders:
            mixed = (state ^ (state >> 16)) * 0x45D9F3B & _MASK
            rows.append((mixed ^ (mixed >> 13)) % buckets)
    return rows


class NGramEmbedding(nn.Module):
    """N-gram embedding: ids [B, T] -> [B, T, d], the sum of the rows of each order's n-gram. Tables start at zero.

    Args:
        orders: n-gram lengths, ascending, each at least 2.
        buckets: rows per table; n-grams that collide share a row.
    """

    def __init__(self, orders: Sequence[int], buckets: int, d: int) -> None:
        super().__init__()
        if not orders or min(orders) < 2 or list(orders) != sorted(set(orders)):
            raise ConfigError(
                f"ngram_orders is {list(orders)}", expected="ascending lengths of at least 2, as [2, 3]"
            )
        self.orders, self.buckets = tuple(orders), buckets
        self.tables = nn.ParameterList([nn.Parameter(torch.zeros(buckets, d)) for _ in orders])

    def forward(
        self, ids: Tensor, segments: Tensor | None = None, prefix_ids: Tensor | None = None
    ) -> Tensor:
        rows = ngram_bucket_ids(ids, self.orders, self.buckets, segments, prefix_ids)
        total = F.embedding(rows[0], self.tables[0], sparse=True)
        for row, table in zip(rows[1:], list(self.tables)[1:], strict=True):
            total = total + F.embedding(row, table, sparse=True)
        return total
