"""The interface of layers that mix positions: attention, linear attention, recurrence, state spaces.

    y = mixer(x)                                   a whole row, in training
    state = mixer.new_state(batch, capacity)
    y = mixer(x[:, :5], state=state)               the same outputs, any number of positions at a time
    y = mixer(x[:, 5:6], state=state)

A model decodes through this interface with any layer: one that keeps keys and values, a latent, or a state of fixed
size. A test of each layer compares the two ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError


class MixerState(Protocol):
    """Decoding state of one layer. length: positions processed so far."""

    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors, for all rows and the whole capacity."""
        ...


class PooledState(ABC):
    """State of several concatenated rows, for a layer whose state has a fixed size.

    It runs the mixer on groups of rows (`engine/cache/pages.py`).
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
