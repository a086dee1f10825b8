"""Rotary positions (Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34).

Feature pairs of queries and keys are turned by an angle proportional to the position, so that their product
depends on the distance alone. Layout: half-split (feature i is paired with i + head_dim/2), as in the Llama
family's exchange format. Angles are computed in fp32: at position 10,000 bf16 could not even tell neighbours
apart.
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


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, H, head_dim]; cos, sin: [(B,) T, 1, head_dim] -> turned x, same shape and dtype."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin
