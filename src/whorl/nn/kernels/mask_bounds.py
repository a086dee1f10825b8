"""What an attention kernel needs to know of a `Mask`: which blocks to visit, and which scores of a block to leave out.

A `Mask` (`nn/attention/mask.py`) is told here as causal, a window, an offset, documents of a packed row, and padding
keys; the last two are one thing, a document number a query and a key, with a number of its own for padding. Strides and
blocks of a layout are not known to the kernels.

What may not be seen is left out twice. Whole blocks are never visited: causality and window bound the walk by arithmetic
(`keys_of`, `queries_of`), and for documents the smallest and largest number in each block of queries and of keys are
compared beforehand, in torch (`reach`), so that the cost of a packed row is that of its documents. Inside of a block -inf
replaces scores (`allowed`); blocks that need none of this, those wholly below the diagonal, are walked by code without it.

The subtle part is that bounds may be too wide and never too narrow: the numbers of documents need not grow along the
row, a block may hold several, and two ranges that overlap may share nothing. `allowed` decides; bounds only save time.

Shapes: query documents [B, Tq], key documents [B, Tk]; bounds [B, blocks, 2]: first place, and the place beyond the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.nn.attention.mask import Mask
from whorl.nn.kernels.triton_support import jit, tl

PADDING_DOCUMENT = -(1 << 31)  # the document number of a padding key


@dataclass(frozen=True)
class MaskBounds:
    """A mask as the kernels read it.

    Args:
        query_documents, key_documents: [B, Tq], [B, Tk] int32 (rows may be spread), or None twice.
        keys: [B, query blocks, 2] int32: bounds of the keys that a block of queries may see by its documents.
        queries: [B, key blocks, 2] int32: bounds of the queries that may see a block of keys.
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
        """(query documents, key documents, bounds, strides of the two); `otherwise` is a pointer that nobody follows."""
        if self.query_documents is None or self.key_documents is None or bounds is None:
            return placeholder, placeholder, placeholder, 0, 0
        strides = self.query_documents.stride(0), self.key_documents.stride(0)
        return self.query_documents, self.key_documents, bounds, *strides


def make_mask_bounds(mask: Mask, q: Tensor, k: Tensor, blocks: tuple[int, int]) -> MaskBounds:
    """The mask's tensors made ready for blocks of (queries, keys)."""
    batch, n_queries, n_keys = q.shape[0], q.shape[2], k.shape[2]
    mask.check(n_queries, n_keys)
    ours, theirs = mask.query_segments, mask.key_segments
    if mask.key_allowed is not None and theirs is None:
        ours, theirs = (torch.zeros(1, n, device=q.device, dtype=torch.int32) for n in (n_queries, n_keys))
    parts: tuple[Tensor | None, ...] = (None, None, None, None)
    if ours is not None and theirs is not None:
        ours, theirs = ours.to(q.device, torch.int32), theirs.to(q.device, torch.int32)
        if mask.key_allowed is not None:
            theirs = torch.where(mask.key_allowed.to(q.device), theirs, PADDING_DOCUMENT)
        ours, theirs = ours.contiguous().expand(batch, -1), theirs.contiguous().expand(batch, -1)
        parts = (ours, theirs, *document_bounds(ours, theirs, blocks))
    return MaskBounds(mask.causal, mask.window or 0, mask.offset, *parts)


def document_bounds(
    query_documents: Tensor, key_documents: Tensor, blocks: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """ours: [B, Tq]; theirs: [B, Tk] -> bounds [B, query blocks, 2] in keys, [B, key blocks, 2] in queries.

    Two blocks can share a document only if their ranges of numbers overlap: true of any numbering, and sharp where
    documents lie one after another under growing numbers.
    """
    low_q, high_q = _block_min_max(query_documents, blocks[0])
    low_k, high_k = _block_min_max(key_documents, blocks[1])
    meet = (low_k[:, None, :] <= high_q[:, :, None]) & (high_k[:, None, :] >= low_q[:, :, None])
    return _block_bounds(meet, blocks[1]), _block_bounds(meet.transpose(1, 2), blocks[0])


def _block_min_max(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[B, T] -> smallest and largest number in each block, [B, blocks] each; of padding alone, an empty range."""
    length = documents.shape[1]
    at = torch.arange(-(-length // size) * size, device=documents.device).clamp(max=length - 1)
    parts = documents[:, at].unflatten(1, (-1, size))
    return torch.where(parts == PADDING_DOCUMENT, -PADDING_DOCUMENT - 1, parts).amin(-1), parts.amax(-1)


def _block_bounds(meet: Tensor, size: int) -> Tensor:
    """meet: [B, n, m] bool -> [B, n, 2] int32: places of the first and beyond the last block that is met; 0, 0 for none."""
    found = meet.int()
    first = found.argmax(-1)
    stop = torch.where(meet.any(-1), found.shape[-1] - found.flip(-1).argmax(-1), first)
    return (torch.stack([first, stop], dim=-1) * size).int().contiguous()


@jit
def allowed(
    query, key, n_keys, ours, theirs, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """query, ours: [m, 1] or [1, m]; key, theirs: across -> bool. Queries count from the first key."""
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
    """Queries first .. last, counted from the first key -> (start, full, stop): keys to walk; no mask before `full`."""
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
    """Keys first .. last -> (start, full, stop): queries of the call to walk; from `full` on none needs a mask."""
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
