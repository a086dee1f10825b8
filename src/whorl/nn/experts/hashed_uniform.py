"""Uniform numbers that are a function of a seed and of indices: equal for any split of the work, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _MIX = (
    -0x61C8864680B583EB,
    (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15),
)  # of SplitMix64, as signed numbers


def hashed_uniform(seed: int, *indices: Tensor) -> Tensor:
    """Return numbers in [0, 1), 24 bits each, in the broadcast shape of the indices (int64).

    They are rounds of SplitMix64 (Steele et al. 2014, doi:10.1145/2714064.2660195), one for each index.
    """
    x = torch.tensor(seed % (1 << 63), dtype=torch.int64, device=indices[0].device)
    for index in indices:
        x = x + (index + 1) * _STEP
        for shift, factor in zip((30, 27), _MIX, strict=True):
            x = (x ^ _shifted(x, shift)) * factor
        x = x ^ _shifted(x, 31)
    return (x & 0xFFFFFF).float() / (1 << 24)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # without the sign
