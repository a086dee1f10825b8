"""The interface of layers that mix positions: attention, linear attention, recurrence, state spaces.

    y = mixer(x)                                   a whole row, in training
    state = mixer.new_state(batch, capacity)
    y = mixer(x[:, :5], state=state)               the same outputs, any number of positions at a time
    y = mixer(x[:, 5:6], state=state)
    spec = mixer.cache_spec()                      what an engine stores for it

A model decodes through this interface with any layer: one that keeps keys and values, a latent, or a state of fixed
size. A test of each layer compares the two ways.

`new_state` serves rows of equal length. An engine serves many rows of many lengths, so it allocates the memory itself: the
mixer declares it by `cache_spec`, as the layers of vLLM do, and receives a state over that memory. A mixer whose cache
grows per token is served by paged memory (`TokenCacheMixer` in `nn/attention/token_cache.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError


@dataclass(frozen=True)
class CacheSpec:
    """Memory that an engine allocates for one layer. window: positions that a query sees, itself included; None for all.

    paged: whether the memory grows per token, in pages. Pages outside of the window are freed.
    """

    window: int | None = None
    paged: ClassVar[bool] = True

    @property
    def rolls_back(self) -> bool:
        """Whether the newest positions can be removed again: neither from a state, nor from a window of freed pages."""
        return self.paged and self.window is None


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(CacheSpec):
    """Keys and values per token, read through `nn/attention/paged.py:PagedState`.

    raw_keys: also the keys before they are mixed with their predecessors.
    """

    n_kv_heads: int
    head_dim: int
    raw_keys: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentCacheSpec(CacheSpec):
    """One latent of `width` features per token, read through `nn/attention/paged.py:PagedLatent`."""

    width: int


@dataclass(frozen=True, kw_only=True)
class TokenCacheSpec(CacheSpec):
    """Named tensors per token, of the given shapes, read through `nn/attention/token_cache.py:TokenState`."""

    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateCacheSpec(CacheSpec):
    """One state per sequence, which `new_state` allocates for the whole capacity: of fixed size in a recurrence."""

    paged: ClassVar[bool] = False


@dataclass(frozen=True)
class SharedCacheSpec(CacheSpec):
    """No memory: the layer reads the cache of the nearest earlier layer that provides it."""

    paged: ClassVar[bool] = False

    @property
    def rolls_back(self) -> bool:
        """True: what it reads rolls back, or not, by its own spec."""
        return True


class MixerState(Protocol):
    """Decoding state of one layer. length: positions processed so far."""

    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors, for all rows and the whole capacity."""
        ...


class PooledState(ABC):
    """State of several concatenated rows, for a layer that processes rows of equal length only.

    It runs the mixer on groups of rows (`engine/cache/pages.py`, `engine/cache/token_pages.py`).
    """

    length = 0

    @abstractmethod
    def run_mixer(self, mixer: Any, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return the outputs of `mixer` for x [1, N, d_model], same shape. positions: [1, N]."""


class Mixer(Protocol):
    """A layer [B, T, d_model] -> [B, T, d_model]; each position depends on itself and, if causal, on earlier ones only."""

    def __call__(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
    ) -> Tensor:
        """Return the mixed positions.

        positions: [T] or [B, T] integers, by default those after the state's length; segments: [B, T] documents of a
        packed row, which do not mix, or None; state: read, and extended in place by x.
        """
        ...

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Any:
        """Return an empty `MixerState` for `batch` rows of up to `capacity` positions."""
        ...

    def cache_spec(self) -> CacheSpec:
        """Return what an engine stores for this layer."""
        ...


def check_state(batch: int, n_new: int, rows: int, n_held: int, capacity: int | None = None) -> None:
    """Check that `n_new` positions of `batch` rows fit a state of `rows` rows with `n_held` of `capacity` positions.

    Raises:
        ConfigError: they do not fit.
    """
    if batch != rows:
        raise ConfigError(f"x has {batch} rows, and the state {rows}", expected="the same number of rows")
    if capacity is not None and n_held + n_new > capacity:
        raise ConfigError(
            f"the state holds {n_held} positions, {n_new} more are added, and its capacity is {capacity}",
            expected=f"at most {capacity - n_held} more",
            do="call new_state with a larger capacity, or start a new row",
        )
