"""What every layer that mixes positions has in common: attention, linear attention, recurrence, state spaces.

    y = mixer(x)                                   a whole row, in training
    state = mixer.new_state(batch, capacity)
    y = mixer(x[:, :5], state=state)               the same outputs, any number of positions at a time
    y = mixer(x[:, 5:6], state=state)

So a model need not know what its layers are, and decodes through one interface, whether a layer keeps keys and values,
a latent, or a state of fixed size. A test of each member holds the two ways together.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class State(Protocol):
    """What decoding keeps of the past of one layer. length: positions taken in so far."""

    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its tensors, of all rows and of the whole capacity."""
        ...


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


def positions_of(length: int, state: State | None, device: torch.device) -> Tensor:
    """[length] the positions that come next."""
    start = 0 if state is None else state.length
    return torch.arange(start, start + length, device=device)
