"""Rotary positions (Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34).

Feature pairs of queries and keys are turned by an angle proportional to the position, so that their product
depends on the distance alone. Layout: half-split (feature i is paired with i + head_dim/2), as in the Llama
family's exchange format. Angles are computed in fp32: at position 10,000 bf16 could not even tell neighbours
apart.

`Rotary` keeps the tables: made inside of a compiled region they would be fused into every kernel that turns
something, cosines and all, in each layer, forward and backward (2 ms of a 50 ms step of the quickstart's model).
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import ConfigError


def rotary_tables(
    positions: Tensor, head_dim: int, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """positions: [..., T] integers -> (cos, sin), each [..., T, 1, head_dim] in `dtype`.

    `sin` carries the signs of the half-turn (minus in its first half), so that `apply_rotary` needs no negation.

    Raises:
        ConfigError: `head_dim` is odd.
    """
    if head_dim % 2:
        raise ConfigError(
            f"head_dim is {head_dim}", expected="an even number: rotary turns pairs of features"
        )
    frequency = base ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angle = positions[..., None].float() * frequency  # [..., T, head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    return (
        torch.cat([cos, cos], dim=-1).unsqueeze(-2).to(dtype),
        torch.cat([-sin, sin], dim=-1).unsqueeze(-2).to(dtype),
    )


class Rotary:
    """The tables of all positions that were asked for so far, computed once.

    Args:
        head_dim, base, dtype: as in `rotary_tables`.
    """

    def __init__(self, head_dim: int, base: float, dtype: torch.dtype) -> None:
        self.head_dim, self.base, self.dtype = head_dim, base, dtype
        self._tables: tuple[Tensor, Tensor] | None = None

    def upto(self, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions 0 .. at least `stop` - 1, each [>= stop, 1, head_dim]."""
        kept = self._tables
        if kept is None or kept[0].shape[0] < stop or kept[0].device != device:
            room = 1 << (stop - 1).bit_length()
            # Tables made while sampling must also serve a training step, which may not save inference tensors.
            with torch.inference_mode(False):
                positions = torch.arange(room, device=device)
                kept = self._tables = rotary_tables(positions, self.head_dim, self.base, self.dtype)
        return kept

    def between(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions start .. stop - 1, each [stop - start, 1, head_dim]."""
        cos, sin = self.upto(stop, device)
        return cos[start:stop], sin[start:stop]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `positions` [..., T], each [..., T, 1, head_dim]."""
        return rotary_tables(positions, self.head_dim, self.base, self.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, H, head_dim]; cos, sin: [(B,) T, 1, head_dim] -> turned x, same shape and dtype."""
    half = x.shape[-1] // 2
    x, cos, sin = (t.view(*t.shape[:-1], 2, half) for t in (x, cos, sin))
    # A flip, not two slices and a cat: a compiler turns it into plain loads, where a cat needs a mask for every element.
    return (x * cos + x.flip(-2) * sin).flatten(-2)
