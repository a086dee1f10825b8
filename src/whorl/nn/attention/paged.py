"""Interfaces of a paged KV cache, as used by attention layers.

A `KeyValueState` holds rows of equal length. An engine that serves many texts has rows of many lengths. It concatenates
them into a batch of one, [1, N, d_model]; the keys of each row are in pages of a shared cache (Kwon et al. 2023,
PagedAttention, arXiv:2309.06180). The layer computes queries, keys and values as usual and passes them to the state,
which finds predecessors, stores keys and attends. `engine/cache/pages.py` has the implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from whorl.nn.attention.mask import Mask


class PagedState(ABC):
    """Paged cache of one attention layer for N new positions of several rows."""

    @abstractmethod
    def predecessors(self, k: Tensor) -> Tensor:
        """Store raw keys k [1, N, KV, d]; return each position's predecessor (at a row's start, its own key)."""

    @abstractmethod
    def write(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values that are ready for attention, [1, KV, N, d] each."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        mask: Mask,
        scale: float | None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Return attention of q [1, H, N, d] over the stored keys of each row. Arguments as in `backends.attend`."""


class PagedLatent(ABC):
    """Paged cache of a layer that caches a latent (`mla.py`)."""

    @abstractmethod
    def write(self, rows: Tensor) -> None:
        """Store rows: [1, N, kv_rank + rope_dim]."""

    @abstractmethod
    def attention_groups(self) -> list[tuple[Tensor, Tensor, Mask]]:
        """Return groups of rows with equal numbers of positions: (indices [B, T] into N, cache [B, S, ...], mask)."""
