"""Pages of a mixer that declares tensors per token (`TokenCacheSpec`): the mixer runs on groups of rows.

    pools  [n_pages, page_size, *shape] per name     position p of a row: page pages[p // page_size], offset p % page_size

The groups are those of attention (`pages.py`): decoding rows together, each longer row separately. For each group the mixer
gets x [B, T, d_model] and a state; `extend` writes the new positions into the pages and gathers those of the row. So a mixer
does not depend on pages or batches, and a new one needs no code here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whorl.engine.cache.pages import AttentionGroup, PageIndex
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.token_cache import StoredTokens, TokenCache
from whorl.nn.mixer import PooledState, TokenCacheSpec


class TokenPages(PooledState):
    """The tensors of one layer, in pages."""

    def __init__(
        self, spec: TokenCacheSpec, n_pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self.window = spec.window
        self.pools = {
            name: torch.zeros(n_pages, page_size, *shape, dtype=dtype, device=device)
            for name, shape in spec.shapes.items()
        }
        self.page_index: PageIndex | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer; their first dimension is the page."""
        return list(self.pools.values())

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def run_mixer(self, mixer: Any, x: Tensor, positions: Tensor | None) -> Tensor:
        assert self.page_index is not None and positions is not None
        y = torch.empty_like(x)
        for group in self.page_index.groups:
            rows = group.query_indices  # [B, T]
            state = _GroupCache(self.pools, self.page_index, group, self.window)
            y[0, rows] = mixer(x[0, rows], positions=positions[0, rows], state=state)
        return y


class _GroupCache(TokenCache):
    """The state of one group of rows in one step."""

    def __init__(
        self, pools: Mapping[str, Tensor], index: PageIndex, group: AttentionGroup, window: int | None
    ) -> None:
        self.pools, self.index, self.group, self.window = pools, index, group, window

    def extend(self, new: Mapping[str, Tensor], segments: Tensor | None) -> StoredTokens:
        group, at = self.group, self.group.query_indices
        page, offset = self.index.page[at], self.index.page_offset[at]
        stored = {}
        for name, t in new.items():
            pool = self.pools[name]
            pool[page, offset] = t.to(pool.dtype)
            stored[name] = pool[group.pages].flatten(1, 2).to(t.dtype)  # [B, S, *shape]
        keys = group.key_positions
        if at.shape[1] == 1:  # rows of different lengths
            distance = group.query_positions - keys
            seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
            return StoredTokens(stored, Mask(causal=False, key_allowed=seen), group.query_positions, keys)
        stored = {name: t[:, : group.n_keys] for name, t in stored.items()}
        mask = Mask(window=self.window, offset=group.n_keys - at.shape[1])
        return StoredTokens(stored, mask, group.query_positions, keys[:, : group.n_keys])
