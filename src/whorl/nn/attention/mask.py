"""Attention masks: which keys a query may attend to, in one description that every backend reads.

A query may attend to a key when every given part of the `Mask` allows it. Let i be the position of the query, j that
of the key, and d = i - j:

- causal:      d >= 0
- window w:    |d| < w; with `causal`, the query and w - 1 keys before it (Beltagy et al. 2020, Longformer,
               arXiv:2004.05150, sec. 3.1)
- stride l:    |d| < l or d mod l = 0: the last l positions, and every l-th earlier one (Child et al. 2019, Sparse
               Transformers, arXiv:1904.10509, sec. 4.3; their heads A^(1) and A^(2) merged into one). With l near
               sqrt(T), two layers connect all positions, at a cost of T sqrt(T)
- block b:     i // b and j // b are neighbors in `layout`, a matrix [blocks, blocks]; without one, i // b = j // b, or
               i // b >= j // b with `earlier_blocks` (block diffusion, Arriola et al. 2025, arXiv:2503.09573)
- segments:    query and key are in the same document of a packed row
- key_allowed: the key is not padding
- allowed:     True at the pair in a matrix that the caller gives

The subtle part is the position. In decoding, query i of a call is at `offset` + i among the keys. Distances need no
more than that. Blocks are counted from the start of each document, so that packed rows equal separate documents.

`mask_mod` is the only definition, a function of indices as in `flex_attention`; `dense` evaluates it on a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whorl.errors import ConfigError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) indices -> bool


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to; True = attend.

    Args:
        causal: no key after the query.
        window: keys at a smaller distance.
        stride: keys at a smaller distance, or at a multiple of it.
        block: size of blocks; keys of the same block, or of the blocks in `layout`.
        query_segments, key_segments: [B, Tq], [B, Tk] document numbers; both or neither.
        key_allowed: [B, Tk] bool, False where a key is padding.
        offset: position of the first query among the keys.
        layout: [blocks, blocks] bool, the blocks of keys (columns) that a block of queries (rows) may attend to.
        allowed: bool, broadcasts to [B, H, Tq, Tk], as the mask of torch's scaled_dot_product_attention.
        earlier_blocks: keys of all earlier blocks too; without `block` the whole row is one.

    Raises:
        ConfigError: a size below 1; a negative offset; one of a pair only; a tensor of another shape or type.
    """

    causal: bool = True
    window: int | None = None
    stride: int | None = None
    block: int | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    key_allowed: Tensor | None = None
    offset: int = 0
    layout: Tensor | None = None
    allowed: Tensor | None = None
    earlier_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "stride", "block"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}", expected="at least 1, or None for no such limit")
        if self.offset < 0:
            raise ConfigError(f"offset is {self.offset}", expected="at least 0: keys before the first query")
        if (self.query_segments is None) != (self.key_segments is None):
            raise ConfigError(
                "only one of query_segments and key_segments is given", expected="both, or neither"
            )
        for name in ("query_segments", "key_segments", "key_allowed"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dim() != 2:
                raise ConfigError(f"{name} has the shape {list(tensor.shape)}", expected="[rows, positions]")
        if self.key_allowed is not None and self.key_allowed.dtype != torch.bool:
            raise ConfigError(
                f"key_allowed is of type {self.key_allowed.dtype}", expected="bool, True = attend"
            )
        if self.layout is not None and (
            self.block is None or self.layout.dim() != 2 or self.layout.dtype != torch.bool
        ):
            raise ConfigError("layout does not fit", expected="a bool [blocks, blocks], together with block")
        if self.allowed is not None and (
            self.allowed.dtype != torch.bool or not 2 <= self.allowed.dim() <= 4
        ):
            raise ConfigError(
                f"allowed is {self.allowed.dtype} {list(self.allowed.shape)}",
                expected="bool, True = attend, that broadcasts to [rows, heads, queries, keys]",
                do="pass numbers that are added to the scores as bias",
            )

    @property
    def batch_size(self) -> int | None:
        """Batch size of the parts that differ between rows; None without such parts."""
        for tensor in (self.key_segments, self.key_allowed):
            if tensor is not None:
                return tensor.shape[0]
        rows = 1 if self.allowed is None or self.allowed.dim() < 4 else self.allowed.shape[0]
        return rows if rows > 1 else None

    @property
    def n_heads(self) -> int | None:
        """Number of heads, if `allowed` differs between them; else None."""
        heads = 1 if self.allowed is None or self.allowed.dim() < 3 else self.allowed.shape[-3]
        return heads if heads > 1 else None

    @property
    def is_causal_only(self) -> bool:
        """Whether `causal` is the only limit."""
        parts = (self.window, self.stride, self.block, self.key_segments, self.key_allowed, self.allowed)
        return all(part is None for part in parts)

    def allows_all(self, n_queries: int, n_keys: int) -> bool:
        """Return whether every query may attend to every key, as for the newest position of a causal row."""
        return self.is_causal_only and (not self.causal or (n_queries == 1 and self.offset >= n_keys - 1))

    def dense(self, n_queries: int, n_keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the mask as a bool tensor, [B or 1, H or 1, n_queries, n_keys].

        Raises:
            ConfigError: segments or padding of another length.
        """
        self.check(n_queries, n_keys)
        table_only = not self.causal and replace(self, allowed=None).is_causal_only
        if self.allowed is not None and table_only:
            return self.allowed.expand(self.batch_size or 1, self.n_heads or 1, n_queries, n_keys)
        row = torch.arange(self.batch_size or 1, device=device)[:, None, None, None]
        head = torch.arange(self.n_heads or 1, device=device)[:, None, None]
        query = torch.arange(n_queries, device=device)[:, None]
        key = torch.arange(n_keys, device=device)
        allowed = self.mask_mod()(row, head, query, key)
        return allowed.expand(self.batch_size or 1, self.n_heads or 1, n_queries, n_keys)

    def mask_mod(self) -> MaskMod:
        """Return the mask as a function of (row, head, query, key) index tensors, a `mask_mod` of `flex_attention`."""
        document = None if self.key_segments is None else _position_in_document(self.key_segments)  # [B, Tk]

        def allows(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            at = query + self.offset
            distance = at - key
            allowed = distance >= 0 if self.causal else distance == distance
            if self.window is not None:
                allowed = allowed & (distance.abs() < self.window)
            if self.stride is not None:
                allowed = allowed & ((distance.abs() < self.stride) | (distance % self.stride == 0))
            if self.block is not None:
                query_block, key_block = (
                    (at, key) if document is None else (document[row, at], document[row, key])
                )
                query_block, key_block = query_block // self.block, key_block // self.block
                neighbors = query_block >= key_block if self.earlier_blocks else query_block == key_block
                allowed = allowed & (
                    neighbors if self.layout is None else self.layout[query_block, key_block]
                )
            if self.query_segments is not None and self.key_segments is not None:
                allowed = allowed & (self.query_segments[row, query] == self.key_segments[row, key])
            if self.key_allowed is not None:
                allowed = allowed & self.key_allowed[row, key]
            if self.allowed is not None:
                table = self.allowed.view(*[1] * (4 - self.allowed.dim()), *self.allowed.shape)
                indices = zip((row, head, query, key), table.shape, strict=True)
                allowed = allowed & table[tuple(at if n > 1 else torch.zeros_like(at) for at, n in indices)]
            return allowed

        return allows

    def check(self, n_queries: int, n_keys: int) -> None:
        """Raise ConfigError when segments, padding or layout have another size."""
        for name, want in (("query_segments", n_queries), ("key_segments", n_keys), ("key_allowed", n_keys)):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape[1] != want or tensor.shape[0] != self.batch_size:
                raise ConfigError(
                    f"{name} has the shape {list(tensor.shape)}", expected=f"[{self.batch_size}, {want}]"
                )
        if self.allowed is not None:
            rows = self.allowed.shape[0] if self.allowed.dim() == 4 else 1
            given = (rows, *self.allowed.shape[-2:])
            if any(
                n not in (1, want)
                for n, want in zip(given, (self.batch_size, n_queries, n_keys), strict=True)
            ):
                raise ConfigError(
                    f"allowed has the shape {list(self.allowed.shape)}",
                    expected=f"one that broadcasts to [{self.batch_size or 'rows'}, heads, {n_queries}, {n_keys}]",
                )
        if self.block is not None and self.key_segments is not None and self.offset + n_queries > n_keys:
            raise ConfigError(
                f"queries {self.offset} to {self.offset + n_queries - 1} are not among the {n_keys} keys",
                expected="queries that are keys too: blocks are counted inside of documents",
            )
        if self.layout is not None:
            last = (max(self.offset + n_queries, n_keys) - 1) // (self.block or 1)
            if last >= min(self.layout.shape):
                raise ConfigError(
                    f"layout has the shape {list(self.layout.shape)}", expected=f"at least {last + 1} blocks"
                )


def _position_in_document(segments: Tensor) -> Tensor:
    """Return positions counted from the start of each document, [B, T]. segments: [B, T]."""
    at = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - torch.where(starts, at, 0).cummax(dim=1).values
