"""Rows of many lengths at once: what a layer does when the past of its rows lies in pages.

A `KeyValueState` is of rows of one length, side by side. An engine that serves many texts at once has rows of many lengths:
they stand one behind another in a batch of one, [1, N, d_model], and each row's keys lie in pages of a cache that all rows
share (Kwon et al. 2023, PagedAttention, arXiv:2309.06180). The products of a layer do not care. What does is few things,
and those are asked of the state: who stood before, where keys go, and what a query may see. So a layer hands over its keys
and queries in place of attending itself, and knows nothing of pages (`engine/cache/pages.py` has the states there are).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from whorl.nn.attention.mask import Mask


class PagedState(ABC):
    """The past of N positions of several rows, for one layer of attention."""

    @abstractmethod
    def predecessors(self, k: Tensor) -> Tensor:
        """k: [1, N, KV, d] raw keys, which are kept -> the one before each in its row (itself, where none is before it)."""

    @abstractmethod
    def write(self, k: Tensor, v: Tensor) -> None:
        """k, v: [1, KV, N, d], ready to be attended to."""

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
        """q: [1, H, N, d] -> [1, H, N, d]: each query over what was put of its row; arguments as of `backends.attend`."""


class PagedLatent(ABC):
    """The same for a layer whose cache is a latent (`latent.py`)."""

    @abstractmethod
    def write(self, rows: Tensor) -> None:
        """rows: [1, N, kv_rank + rope_dim]."""

    @abstractmethod
    def attention_groups(self) -> list[tuple[Tensor, Tensor, Mask]]:
        """Groups of rows with one number of positions each: (where [B, T] among the N, cache [B, S, ...], mask)."""
