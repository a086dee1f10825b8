"""Attention masks in the form of the kernels: which blocks to visit, and which scores of a block to mask.

A `Mask` (`nn/attention/mask.py`) is represented by causality, a window, an offset and document numbers of queries and
keys. Padding keys have a separate document number. Strides and blocks of a layout are not supported.

Masking has two levels. Whole blocks are skipped: causality and window bound the loop by arithmetic (`keys_of`,
`queries_of`). For documents, the smallest and largest number in each block of queries and of keys are compared in torch
(`document_bounds`), so that a packed row costs as much as its documents. Inside a block, -inf replaces masked scores
(`allowed`). Blocks that need no mask, those wholly below the diagonal, have a loop without it.

The subtle part is that bounds may be too wide but never too narrow: document numbers need not be sorted, and a block may
hold several. Two overlapping ranges may have no number in common. `allowed` is exact; bounds only save time.

Shapes: query documents [B, Tq], key documents [B, Tk]; bounds [B, blocks, 2]: first place, and one past the last place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.nn.attention.mask import Mask
from whorl.nn.gpu.triton_support import jit, tl

PADDING_DOCUMENT = -(1 << 31)  # the document number of a padding key


@dataclass(frozen=True)
class MaskBounds:
    """A mask in the form of the kernels.

    Args:
        query_documents, key_documents: [B, Tq], [B, Tk] int32 (rows may be expanded), or both None.
        key_bounds: [B, query blocks, 2] int32: range of the keys that a block of queries may attend to by its documents.
        query_bounds: [B, key blocks, 2] int32: range of the queries that may attend to a block of keys.
    """

    causal: bool
    window: int  # 0: none
    offset: int
    query_documents: Tensor | None
    key_documents: Tensor | None
    key_bounds: Tensor | None
    query_bounds: Tensor | None

    @property
    def flags(self) -> dict[str, bool]:
        return {"CAUSAL": self.causal, "WINDOW": self.window > 0, "DOCUMENTS": self.key_bounds is not None}

    def tensors(self, placeholder: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return (query documents, key documents, bounds, strides of the two); `placeholder` is an unused pointer."""
        if self.query_documents is None or self.key_documents is None or bounds is None:
            return placeholder, placeholder, placeholder, 0, 0
        strides = self.query_documents.stride(0), self.key_documents.stride(0)
        return self.query_documents, self.key_documents, bounds, *strides


def make_mask_bounds(mask: Mask, q: Tensor, k: Tensor, blocks: tuple[int, int]) -> MaskBounds:
    """Return the mask's tensors for blocks of (queries, keys)."""
    batch, n_queries, n_keys = q.shape[0], q.shape[2], k.shape[2]
    mask.check(n_queries, n_keys)
    query_documents, key_documents = mask.query_segments, mask.key_segments
    if mask.key_allowed is not None and key_documents is None:
        query_documents, key_documents = (
            torch.zeros(1, n, device=q.device, dtype=torch.int32) for n in (n_queries, n_keys)
        )
    parts: tuple[Tensor | None, ...] = (None, None, None, None)
    if query_documents is not None and key_documents is not None:
        query_documents, key_documents = (
            query_documents.to(q.device, torch.int32),
            key_documents.to(q.device, torch.int32),
        )
        if mask.key_allowed is not None:
            key_documents = torch.where(mask.key_allowed.to(q.device), key_documents, PADDING_DOCUMENT)
        query_documents, key_documents = (
            query_documents.contiguous().expand(batch, -1),
            key_documents.contiguous().expand(batch, -1),
        )
        parts = (query_documents, key_documents, *document_bounds(query_documents, key_documents, blocks))
    return MaskBounds(mask.causal, mask.window or 0, mask.offset, *parts)


def document_bounds(
    query_documents: Tensor, key_documents: Tensor, blocks: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return bounds [B, query blocks, 2] in keys and [B, key blocks, 2] in queries.

    query_documents: [B, Tq]; key_documents: [B, Tk]. Two blocks can share a document only if their ranges of numbers
    overlap. The bounds are exact where document numbers ascend along the row.
    """
    low_q, high_q = _block_min_max(query_documents, blocks[0])
    low_k, high_k = _block_min_max(key_documents, blocks[1])
    meet = (low_k[:, None, :] <= high_q[:, :, None]) & (high_k[:, None, :] >= low_q[:, :, None])
    return _block_bounds(meet, blocks[1]), _block_bounds(meet.transpose(1, 2), blocks[0])


def _block_min_max(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest number in each block of [B, T], [B, blocks] each; padding gives an empty range."""
    length = documents.shape[1]
    at = torch.arange(-(-length // size) * size, device=documents.device).clamp(max=length - 1)
    parts = documents[:, at].unflatten(1, (-1, size))
    return torch.where(parts == PADDING_DOCUMENT, -PADDING_DOCUMENT - 1, parts).amin(-1), parts.amax(-1)


def _block_bounds(meet: Tensor, size: int) -> Tensor:
    """Return [B, n, 2] int32: the first block and one past the last block with True in meet [B, n, m]; 0, 0 for none."""
    hits = meet.int()
    first = hits.argmax(-1)
    stop = torch.where(meet.any(-1), hits.shape[-1] - hits.flip(-1).argmax(-1), first)
    return (torch.stack([first, stop], dim=-1) * size).int().contiguous()


@jit
def allowed(
    query, key, n_keys, ours, theirs, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Whether a query may attend to a key, bool. Queries count from the first key.

    query: [m, 1] or [1, m]; key: transposed. `ours` and `theirs` are their documents.
    """
    ok = (key < n_keys) & (query == query)
    if CAUSAL:
        ok = ok & (key <= query)
    if WINDOW:
        ok = ok & (query - key < window) & (key - query < window)
    if DOCUMENTS:
        ok = ok & (ours == theirs)
    return ok


@jit
def keys_of(
    first, last, n_keys, window, bounds,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """(start, full, stop) of keys to loop over, for queries first .. last; no mask before `full`.

    Queries count from the first key.
    """
    start = first * 0
    stop = start + n_keys
    full = n_keys // BLOCK_K * BLOCK_K
    if CAUSAL:
        stop = tl.minimum(stop, last + 1)
        full = tl.minimum(full, (first + 1) // BLOCK_K * BLOCK_K)
    if WINDOW:
        start = tl.maximum(start, first - window + 1)
        stop = tl.minimum(stop, last + window)
    if DOCUMENTS:
        start = tl.maximum(start, tl.load(bounds))
        stop = tl.minimum(stop, tl.load(bounds + 1))
    start = start // BLOCK_K * BLOCK_K
    if WINDOW or DOCUMENTS:
        full = start
    return start, tl.minimum(full, stop), stop


@jit
def queries_of(
    first, last, n_queries, n_keys, offset, window, bounds,
    BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """(start, full, stop) of queries to loop over, for keys first .. last; from `full` on no mask is needed."""
    start = first * 0
    stop = start + n_queries
    full = start
    if CAUSAL:
        start = tl.maximum(start, first - offset)
        full = (tl.maximum(last - offset, 0) + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    if WINDOW:
        start = tl.maximum(start, first - window + 1 - offset)
        stop = tl.minimum(stop, last + window - offset)
    if DOCUMENTS:
        start = tl.maximum(start, tl.load(bounds))
        stop = tl.minimum(stop, tl.load(bounds + 1))
    start = start // BLOCK_Q * BLOCK_Q
    if WINDOW or DOCUMENTS:
        full = stop
    return start, tl.minimum(tl.maximum(full, start), tl.maximum(stop, start)), stop
