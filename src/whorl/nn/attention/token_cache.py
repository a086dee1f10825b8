"""Mixers that keep tensors per token: one forward serves training, decoding, and an engine's pages.

A subclass of `TokenCacheMixer` declares the tensors that it keeps for each position, and passes those of the new positions
to `store`. It gets back those of every position that the new ones may read:

    class Pooling(TokenCacheMixer):
        def __init__(self, d_model, *, generator=None):
            super().__init__({"value": (d_model,)})
            self.v = Linear(d_model, d_model, std=d_model**-0.5, generator=generator)

        def forward(self, x, *, positions=None, segments=None, state=None):
            stored = self.store(state, segments, value=self.v(x))
            allowed = stored.allowed().to(x.dtype)                                    # [B or 1, T, S]
            return allowed @ stored["value"] / allowed.sum(-1, keepdim=True)          # mean over the past

Without a state, the stored tensors are the new ones. A `TokenState` holds rows of equal length. An engine has rows of many
lengths: it calls the mixer with a group of rows, and the stored tensors are read from pages
(`engine/cache/token_pages.py`).

The subtle point is padding: rows of different lengths are decoded together, so S is that of the longest. Values that
the mask hides are arbitrary but finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError, one_of
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.state import append_positions, extend_segments
from whorl.nn.mixer import TokenCacheSpec, check_state


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """The stored tensors that T new positions may read, by name: [B, S, *shape], the new ones included.

    mask: which of the S positions each of the T may read. query_positions: [B or 1, T], key_positions: [B or 1, S], counted
    along the row; their difference is the distance.
    """

    tensors: Mapping[str, Tensor]
    mask: Mask
    query_positions: Tensor
    key_positions: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def allowed(self) -> Tensor:
        """Return the mask as a bool tensor, [B or 1, T, S]."""
        n_queries, n_keys = self.query_positions.shape[1], self.key_positions.shape[1]
        return self.mask.dense(n_queries, n_keys, self.key_positions.device)[:, 0]


class TokenCache(ABC):
    """Memory of the tensors of one layer, for the rows of one call."""

    @abstractmethod
    def extend(self, new: Mapping[str, Tensor], segments: Tensor | None) -> StoredTokens:
        """Append the tensors of new positions, [B, T, *shape] each; return what these positions may read."""


@dataclass
class TokenState(TokenCache):
    """Preallocated tensors of one layer, for rows of equal length.

    tensors: [B, size, *shape] each, with the last min(length, size) positions filled; size is the capacity, or window - 1
    where that is less. segments: [B, capacity] from the first call with segments.

    Raises:
        ConfigError: by `extend`, when more than `capacity` positions are added.
    """

    tensors: dict[str, Tensor]
    capacity: int
    window: int | None = None
    segments: Tensor | None = None
    length: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), self.segments) if t is not None)

    def extend(self, new: Mapping[str, Tensor], segments: Tensor | None) -> StoredTokens:
        batch, n_new = next(iter(new.values())).shape[:2]
        rows, size = next(iter(self.tensors.values())).shape[:2]
        check_state(batch, n_new, rows, self.length, self.capacity)
        held, stop = min(self.length, size), self.length + n_new
        first = self.length - held
        self.segments = extend_segments(self.segments, segments, self.length, n_new, self.capacity)
        documents = None if self.segments is None else self.segments[:, first:stop]
        with_grad = torch.is_grad_enabled()  # as in `KeyValueState`: gradients stop at the state
        tensors = {
            name: append_positions(self.tensors[name], t, held, with_grad, 1) for name, t in new.items()
        }
        self.length = stop
        return _stored_row(tensors, documents, first, held, self.window)


def _stored_row(
    tensors: Mapping[str, Tensor], segments: Tensor | None, first: int, held: int, window: int | None
) -> StoredTokens:
    """Return the tensors [B, S, *shape] of positions `first` to first + S; those after `held` are new."""
    one = next(iter(tensors.values()))
    keys = torch.arange(first, first + one.shape[1], device=one.device)[None]
    mask = Mask(
        window=window,
        query_segments=None if segments is None else segments[:, held:],
        key_segments=segments,
        offset=held,
    )
    return StoredTokens(tensors, mask, keys[:, held:], keys)


class TokenCacheMixer(nn.Module):
    """Base of a mixer whose cache grows per token (see the top of this file).

    Args:
        shapes: of the tensors that it keeps for each position, by name.
        window: positions that a position reads, itself included; None for all earlier ones.

    Raises:
        ConfigError: no tensor, a size below 1, or a window below 1.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], window: int | None = None) -> None:
        super().__init__()
        if not shapes or any(size < 1 for shape in shapes.values() for size in shape):
            raise ConfigError(f"shapes are {dict(shapes)}", expected="at least one tensor, with sizes from 1")
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}", expected="at least 1, or None")
        self.token_shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.window = window

    def cache_spec(self) -> TokenCacheSpec:
        """Return the tensors that the layer keeps for each token."""
        return TokenCacheSpec(window=self.window, shapes=self.token_shapes)

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> TokenState:
        """Return an empty state for `batch` rows of up to `capacity` positions."""
        size = capacity if self.window is None else min(capacity, self.window - 1)
        tensors = {
            name: torch.zeros(batch, size, *shape, dtype=dtype, device=device)
            for name, shape in self.token_shapes.items()
        }
        return TokenState(tensors, capacity, self.window)

    def store(self, state: TokenCache | None, segments: Tensor | None, **new: Tensor) -> StoredTokens:
        """Append the tensors of new positions, [B, T, *shape] each, and return what these positions may read.

        Args:
            state, segments: as given to the layer.

        Raises:
            ConfigError: other tensors than declared, or of other shapes; a full state.
        """
        if new.keys() != self.token_shapes.keys():
            wrong = sorted(new.keys() ^ self.token_shapes.keys())[0]
            raise ConfigError(
                f"{type(self).__name__} stores {sorted(new)}",
                expected=f"the tensors of its constructor, {one_of(wrong, sorted(self.token_shapes))}",
            )
        for name, t in new.items():
            if t.shape[2:] != self.token_shapes[name]:
                raise ConfigError(
                    f"{type(self).__name__} stores {name!r} of the shape {list(t.shape)}",
                    expected=f"[rows, positions, {', '.join(map(str, self.token_shapes[name]))}]",
                )
        return _stored_row(new, segments, 0, 0, self.window) if state is None else state.extend(new, segments)
