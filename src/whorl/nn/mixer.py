"""What every layer that mixes positions has in common: attention, linear attention, recurrence, state spaces.

    y = mixer(x)                                   a whole row, in training
    state = mixer.new_state(batch, capacity)
    y = mixer(x[:, :5], state=state)               the same outputs, any number of positions at a time
    y = mixer(x[:, 5:6], state=state)

So a model need not know what its layers are, and decodes through one interface, whether a layer keeps keys and values,
a latent, or a state of fixed size. A test of each member holds the two ways together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError


class MixerState(Protocol):
    """What decoding keeps of the past of one layer. length: positions taken in so far."""

    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors, of all rows and of the whole capacity."""
        ...


class PooledState(ABC):
    """The past of several rows, one behind another in a batch of 1, for a layer whose state is of fixed size: it drives the
    mixer itself, group by group of rows (`engine/cache/pages.py`)."""

    length = 0

    @abstractmethod
    def run_mixer(self, mixer: Any, x: Tensor, positions: Tensor | None) -> Tensor:
        """x: [1, N, d_model] -> [1, N, d_model]; positions: [1, N]."""


class Mixer(Protocol):
    """[B, T, d_model] -> [B, T, d_model], each position from itself and earlier ones (where it is causal)."""

    def __call__(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
    ) -> Tensor:
        """positions: [T] or [B, T] integers, by default those behind the state's length; segments: [B, T] the documents
        of a packed row, none of which sees another, or None; state: read, and extended in place by x."""
        ...

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Any:
        """An empty `State` for `batch` rows of up to `capacity` positions."""
        ...


def check_state(batch: int, n_new: int, rows: int, n_held: int, capacity: int | None = None) -> None:
    """Before a state is read: that `batch` rows of `more` positions fit one of `rows` rows with `held` of `capacity`.

    Raises:
        ConfigError: they do not.
    """
    if batch != rows:
        raise ConfigError(f"x has {batch} rows, and the state {rows}", expected="as many rows")
    if capacity is not None and n_held + n_new > capacity:
        raise ConfigError(
            f"the state holds {n_held} positions, {n_new} more come, and its capacity is {capacity}",
            expected=f"at most {capacity - n_held} more",
            do="call new_state with a larger capacity, or start a new row",
        )
